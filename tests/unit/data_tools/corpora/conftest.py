"""A server of files for tests that fetch: its address, and what it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.data_tools.corpora.serving import Behaviour, serving


@pytest.fixture
def server() -> Iterator[tuple[str, Behaviour]]:
    behaviour = Behaviour()
    with serving(behaviour) as url:
        yield url, behaviour
