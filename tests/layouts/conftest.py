"""One process's answers, computed once for all layouts that are compared with them."""

from __future__ import annotations

import pytest

from tests.layouts.outcome import References
from tests.layouts.workers import Pool


@pytest.fixture(scope="session")
def references(pool: Pool) -> References:
    return References(pool)
