"""How much memory a reshard must be allowed."""

from __future__ import annotations

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import BLOCK_BYTES
from lmtrain.checkpoint.reshard.write_target_files import BASE_BYTES, MIN_PART_BYTES, PART_BYTES, Limits
from lmtrain.errors import UsageError

MIB = 1 << 20


def test_limits() -> None:
    with pytest.raises(UsageError, match="--workers 0"):
        Limits(workers=0)
    with pytest.raises(UsageError, match=r"too little for 4 workers. Use --max-memory \d+MiB"):
        Limits(memory_bytes=64 * MIB, workers=4)


@pytest.mark.parametrize("workers", [1, 2, 7, 64])
@pytest.mark.parametrize("more", [0, 1, 50 * MIB, 2048 * MIB])
@pytest.mark.parametrize("copies", [2, 3])
def test_all_workers_together_keep_within_the_memory(workers: int, more: int, copies: int) -> None:
    """A worker holds copies of its part, a block that it reads and one that it writes."""
    least = BASE_BYTES + workers * (copies * MIN_PART_BYTES + 2 * BLOCK_BYTES) + 4 * BLOCK_BYTES
    limits = Limits(memory_bytes=least + more, workers=workers, copies=copies)
    each = copies * limits.part_bytes + 2 * BLOCK_BYTES
    assert BASE_BYTES + limits.num_cached_blocks * BLOCK_BYTES + workers * each <= limits.memory_bytes
    assert limits.num_cached_blocks >= 1
    assert MIN_PART_BYTES <= limits.part_bytes <= PART_BYTES
    with pytest.raises(UsageError, match=f"too little for {workers} workers"):
        Limits(memory_bytes=least - 1, workers=workers, copies=copies)
