"""The bench of the proofs and the small world: one of each for each process that runs tests."""

from __future__ import annotations

import pytest

from tests.layouts.workers import Pool
from tests.promise.bench import Bench
from tests.promise.options.small_world import World


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Bench:
    return Bench(tmp_path_factory.mktemp("promise"), pool)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return the small world, which is made when something of it is first used."""
    return World(tmp_path_factory.mktemp("options") / "world")
