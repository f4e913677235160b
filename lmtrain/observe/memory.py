"""How much memory this process holds: host RSS from /proc, and the peak on its device. Called by the training loop.

torch is imported only when a cuda device is asked about, which only someone who runs torch can do.
"""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


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
