"""How much memory a reshard may take and how its workers share it, and how it tells how far it is. Torch-free.

Called by the command line, which knows what the user allows, and by the attempt, which keeps to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmtrain.checkpoint.disk.format import BLOCK_BYTES
from lmtrain.errors import UsageError
from lmtrain.units import format_bytes

PART_BYTES = 32 << 20  # of a tensor, in memory at once
MIN_PART_BYTES = 1 << 20
BASE_BYTES = 128 << 20  # because: Python with numpy takes about 60 MiB, and a manifest some tens
DEFAULT_MEMORY_BYTES = 2 << 30
Report = Callable[[int, int, int], None]  # bytes done, bytes in all, and of those done by an attempt before this one


@dataclass(frozen=True)
class Limits:
    """How much memory the whole process may take, and how that is shared."""

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    workers: int = 1

    def __post_init__(self) -> None:
        least = BASE_BYTES + self.workers * _worker_bytes(MIN_PART_BYTES) + 4 * BLOCK_BYTES
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers} does no work. Use 1 or more.")
        if self.memory_bytes < least:
            raise UsageError(
                f"--max-memory {format_bytes(self.memory_bytes)} is too little for {self.workers} workers. "
                f"Use {format_bytes(least)} or more, or fewer workers."
            )

    @property
    def num_cached_blocks(self) -> int:
        rest = self.memory_bytes - BASE_BYTES
        return min(rest // 4, rest - self.workers * _worker_bytes(MIN_PART_BYTES)) // BLOCK_BYTES

    @property
    def part_bytes(self) -> int:
        rest = (self.memory_bytes - BASE_BYTES - self.num_cached_blocks * BLOCK_BYTES) // self.workers
        return max(MIN_PART_BYTES, min(PART_BYTES, (rest - _worker_bytes(0)) // 2))


def _worker_bytes(part_bytes: int) -> int:
    """What is copied at once, its copy cut for one file, a hash block read and one written."""
    return 2 * part_bytes + 2 * BLOCK_BYTES
