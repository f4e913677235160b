"""How much memory a reshard must be allowed."""

from __future__ import annotations

import pytest

from lmtrain.checkpoint.reshard.limits import Limits
from lmtrain.errors import UsageError

MIB = 1 << 20


def test_limits() -> None:
    with pytest.raises(UsageError, match="--workers 0"):
        Limits(workers=0)
    with pytest.raises(UsageError, match=r"too little for 4 workers. Use \d+\.\d MiB"):
        Limits(memory_bytes=64 * MIB, workers=4)
