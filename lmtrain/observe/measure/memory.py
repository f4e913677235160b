"""How much memory this process holds: host RSS from /proc, and the peak on its device. Called by the training loop.

torch is imported only when a cuda device is asked about, which only someone who runs torch can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_STATUS = Path("/proc/self/status")
_GROWN = 1.05  # because: a row of all ranks is long, and peaks creep


def host_memory_bytes(status: Path = _STATUS) -> int | None:
    """Resident memory of this process now; None where there is no /proc."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("VmRSS:"))
    return next((int(kibibytes) * 1024 for kibibytes in found), None)


def device_peak_bytes(device: str) -> int | None:
    """The most that torch ever held on a cuda device; None for any other device."""
    if not device.startswith("cuda"):
        return None
    import torch  # because: this room starts without torch, and a cuda device exists only where torch runs

    return int(torch.cuda.max_memory_reserved(device))


def memory_bytes(device: str) -> int | None:
    """The figure to show beside a step: the device's peak where there is a device, else what the host holds now."""
    peak = device_peak_bytes(device)
    return host_memory_bytes() if peak is None else peak


class Memory:
    """What this process holds, beside the most that any process of the run has told of, and which one that was."""

    def __init__(self, device: str, rank: int) -> None:
        self._device, self._rank = device, rank
        self._fullest = (0, rank)
        self.newest = 0  # what `now` has last said of this process
        self._peaks: list[int] = []  # of each rank, on the one that hears them
        self._shown: list[int] = []

    def now(self) -> tuple[int, int]:
        """(bytes, rank) of this process; 0 bytes where nobody knows."""
        self.newest = memory_bytes(self._device) or 0
        return self.newest, self._rank

    def hear(self, fullest: tuple[int, int]) -> None:
        """Of all processes, a moment ago."""
        self._fullest = fullest

    def hear_all(self, held: Sequence[int]) -> None:
        """By rank, a moment ago."""
        self._peaks = [*map(max, held, self._peaks or held)]

    def grown(self) -> list[int] | None:
        """The most that each rank has told of, once one of them holds clearly more than this last returned."""
        before = self._shown or [0] * len(self._peaks)
        if not any(now > _GROWN * was for now, was in zip(self._peaks, before, strict=True)):
            return None
        self._shown = self._peaks
        return self._shown

    def fullest(self) -> tuple[int | None, int]:
        num_bytes, rank = max(self.now(), self._fullest)
        return num_bytes or None, rank
