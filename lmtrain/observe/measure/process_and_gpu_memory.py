"""The memory of this process: host RSS from /proc, and the peak on its device. Called by the training loop.

torch is imported only if a cuda device is queried, where torch is loaded anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_STATUS = Path("/proc/self/status")
_GROWN = 1.05  # because: a row of all ranks' peaks is long, and peaks creep upwards


def host_memory_bytes(status: Path = _STATUS) -> int | None:
    """Return the resident memory (VmRSS) of this process in bytes, read from /proc/self/status; None if that file does
    not exist. `status` is another path to read, for tests.
    """
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)  # in KiB there


def device_peak_bytes(device: str) -> int | None:
    """Return the peak number of bytes that torch has reserved on `device`, such as "cuda:0"; None unless it is a cuda
    device.
    """
    if not device.startswith("cuda"):
        return None
    import torch  # because: this package must import without torch, and a cuda device exists only where torch runs

    return int(torch.cuda.max_memory_reserved(device))


class Memory:
    """Memory use of this process and, as exchanged at the end of a step, of the rank that uses the most."""

    def __init__(self, device: str, rank: int) -> None:
        self._device, self._rank = device, rank
        self.fullest_of_ranks = (0, rank)  # (bytes, rank) of the rank with the most, which the ranks find together
        self.newest = 0  # bytes, as `measure` last returned them
        self._peaks: list[int] = []  # bytes per rank; filled on the rank that receives them
        self._reported_peaks: list[int] = []

    def measure(self) -> tuple[int, int]:
        """Measure this process now, and return (bytes, rank): the peak of its cuda device, or resident host memory
        without one; 0 bytes if unknown.
        """
        peak = device_peak_bytes(self._device)
        self.newest = (host_memory_bytes() if peak is None else peak) or 0
        return self.newest, self._rank

    def update_peaks(self, bytes_by_rank: Sequence[int]) -> None:
        """Update the peak of each rank; `bytes_by_rank` has the present values."""
        self._peaks = [*map(max, bytes_by_rank, self._peaks or bytes_by_rank)]

    def grown_peaks(self) -> list[int] | None:
        """Return the peak memory of each rank in bytes if some rank's peak is more than 5% above the one that this
        method last returned, else None. It reads the values of the last `update_peaks` and does not communicate.
        """
        before = self._reported_peaks or [0] * len(self._peaks)
        if not any(new > _GROWN * old for new, old in zip(self._peaks, before, strict=True)):
            return None
        self._reported_peaks = self._peaks
        return self._reported_peaks

    def fullest(self) -> tuple[int | None, int]:
        """Return (bytes, rank) of the rank that uses the most memory; None bytes if unknown."""
        num_bytes, rank = max(self.measure(), self.fullest_of_ranks)
        return num_bytes or None, rank
