"""How much memory this process holds: host RSS from /proc, and the peak on its device. Called by the training loop.

torch is imported only when a cuda device is asked about, which only someone who runs torch can do.
"""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def host_memory_bytes(status: Path = _STATUS) -> int | None:
    """Resident memory of this process now; None where there is no /proc."""
    return _status_bytes(status, "VmRSS")


def host_peak_bytes(status: Path = _STATUS) -> int | None:
    """The most that this process ever held."""
    return _status_bytes(status, "VmHWM")


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


def _status_bytes(status: Path, key: str) -> int | None:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024  # /proc counts in kB and means KiB
    return None
