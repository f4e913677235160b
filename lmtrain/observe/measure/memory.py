"""The memory of this process: host RSS from /proc, and the peak on its device. Called by the training loop.

torch is imported only if a cuda device is queried, where torch is loaded anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_STATUS = Path("/proc/self/status")
_GROWN = 1.05  # because: the row with all ranks is long, and peaks creep upwards


def host_memory_bytes(status: Path = _STATUS) -> int | None:
    """Return the resident memory of this process in bytes, or None on a system without /proc."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("VmRSS:"))
    return next((int(kibibytes) * 1024 for kibibytes in found), None)


def device_peak_bytes(device: str) -> int | None:
    """Return the peak bytes that torch reserved on a cuda device, or None for any other device."""
    if not device.startswith("cuda"):
        return None
    import torch  # because: this package must import without torch, and a cuda device exists only where torch runs

    return int(torch.cuda.max_memory_reserved(device))


def memory_bytes(device: str) -> int | None:
    """Return the bytes to show for a step: the device's peak, or resident host memory without a cuda device."""
    peak = device_peak_bytes(device)
    return host_memory_bytes() if peak is None else peak


class Memory:
    """Memory of this process, and the largest of any rank as reported at the end of a step."""

    def __init__(self, device: str, rank: int) -> None:
        self._device, self._rank = device, rank
        self._fullest = (0, rank)
        self.newest = 0  # bytes, as `now` last returned them
        self._peaks: list[int] = []  # bytes per rank; filled on the rank that receives them
        self._shown: list[int] = []

    def now(self) -> tuple[int, int]:
        """Return (bytes, rank) of this process; 0 bytes if unknown."""
        self.newest = memory_bytes(self._device) or 0
        return self.newest, self._rank

    def hear(self, fullest: tuple[int, int]) -> None:
        """Store (bytes, rank) of the rank that holds the most."""
        self._fullest = fullest

    def hear_all(self, held: Sequence[int]) -> None:
        """Update the peak of each rank; `held` has the bytes per rank."""
        self._peaks = [*map(max, held, self._peaks or held)]

    def grown(self) -> list[int] | None:
        """Return the peak of each rank if a rank has grown by more than 5% since the last return, else None."""
        before = self._shown or [0] * len(self._peaks)
        if not any(now > _GROWN * was for now, was in zip(self._peaks, before, strict=True)):
            return None
        self._shown = self._peaks
        return self._shown

    def fullest(self) -> tuple[int | None, int]:
        num_bytes, rank = max(self.now(), self._fullest)
        return num_bytes or None, rank
