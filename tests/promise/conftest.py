"""The bench of the proofs: one small corpus for each process that runs tests."""

from __future__ import annotations

import pytest

from tests.layouts.workers import Pool
from tests.promise.bench import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Bench:
    return Bench(tmp_path_factory.mktemp("promise"), pool)
