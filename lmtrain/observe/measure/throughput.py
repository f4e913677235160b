"""Throughput of a run: tokens and model FLOPs per second, MFU and the time left, computed from given clock readings.

Called by the training loop and by benchmarks. Reads no clock and no device; it only divides numbers.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from lmtrain.runfolder.run_facts import SPEED_WINDOW_STEPS

# Dense peaks from the vendors' data sheets in FLOP/s (half of the figure "with sparsity"), with fp32 accumulation:
# (fp16 on tensor cores, bf16 on tensor cores, fp32 without tensor cores). The first match counts.
_PEAKS: tuple[tuple[str, float | None, float | None, float | None], ...] = (
    (r"GB200", 2500e12, 2500e12, 80e12),
    (r"B200", 2250e12, 2250e12, 75e12),
    (r"H100 PCIe", 756e12, 756e12, 51e12),
    (r"H100 NVL", 835e12, 835e12, 60e12),
    (r"G?H[12]00|H800", 989.4e12, 989.4e12, 66.9e12),
    (r"H20", 148e12, 148e12, 44e12),
    (r"A100|A800", 312e12, 312e12, 19.5e12),
    (r"A30", 165e12, 165e12, 10.3e12),
    (r"A10", 125e12, 125e12, 31.2e12),
    (r"V100", 125e12, None, 15.7e12),
    (r"T4", 65e12, None, 8.1e12),
    (r"L40S", 362e12, 362e12, 91.6e12),
    (r"L4", 121e12, 121e12, 30.3e12),
    (r"RTX 4090", 165.2e12, 165.2e12, 82.6e12),
    (r"RTX 3090", 71e12, 71e12, 35.6e12),
    (r"RTX A6000", 154.8e12, 154.8e12, 38.7e12),
)
_COLUMNS = {"fp16": 0, "float16": 0, "bf16": 1, "bfloat16": 1, "fp32": 2, "float32": 2}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s, without sparsity, of the GPU model `device_name` (such as "NVIDIA H100 80GB HBM3") for
    products in `dtype`; None if the data-sheet table lacks it.
    """
    if dtype == "tf32":  # because: data sheets give tf32 as half of bf16, and a device without bf16 has no tf32
        half = peak_flops(device_name, "bf16")
        return peak_flops(device_name, "fp32") if half is None else half / 2
    column = _COLUMNS.get(dtype.removeprefix("torch."))
    if column is None:
        return None
    matches = (row[column] for pattern, *row in _PEAKS if re.search(rf"\b(?:{pattern})\b", device_name, re.IGNORECASE))
    return next(matches, None)


@dataclass(frozen=True)
class Rates:
    """Throughput and time left; None where a number is not known yet, or cannot be."""

    tokens_per_s: float | None = None
    flops_per_s: float | None = None  # model FLOPs: recomputation is not counted
    mfu: float | None = None  # share of the peak of all devices, 0 to 1
    eta_s: float | None = None


class Throughput:
    """Rates over the last `window_steps` steps, so that the pause for a checkpoint is soon forgotten.

    The clock starts after the first step of the process, because that step compiles, fills caches and allocates memory,
    and is not representative.
    """

    def __init__(
        self,
        *,
        flops_per_token: float | None = None,
        peak: float | None = None,  # FLOP/s of all devices together
        window_steps: int = SPEED_WINDOW_STEPS,
    ) -> None:
        self._flops_per_token, self._peak = flops_per_token, peak
        self._marks: deque[tuple[int, float, int]] = deque(maxlen=window_steps + 1)  # (step, time in s, tokens so far)
        self._is_warm = False

    def start(self, step: int, now_s: float) -> None:
        """Start counting at this step; also after a pause for an evaluation or a checkpoint."""
        self._marks.clear()
        self._marks.append((step, now_s, 0))

    def step_done(self, step: int, now_s: float, tokens: int) -> None:
        """Record that step number `step` ended at `now_s`, in seconds of the caller's clock, and consumed `tokens`
        tokens over all ranks. The first step is slow and not counted. Raise ValueError if `start` was not called
        before.
        """
        if not self._marks:
            raise ValueError("step_done() was called before start(). Call start() before the first step.")
        if self._is_warm:
            self._marks.append((step, now_s, self._marks[-1][2] + tokens))
        else:
            self._is_warm = True
            self.start(step, now_s)

    def rates(self, total_steps: int | None = None) -> Rates:
        if len(self._marks) < 2:
            return Rates()
        (first, began, before), (last, ended, after) = self._marks[0], self._marks[-1]
        seconds = ended - began
        if seconds <= 0:
            return Rates()
        tokens_per_s = (after - before) / seconds
        flops_per_s = None if self._flops_per_token is None else tokens_per_s * self._flops_per_token
        return Rates(
            tokens_per_s=tokens_per_s,
            flops_per_s=flops_per_s,
            mfu=flops_per_s / self._peak if flops_per_s is not None and self._peak else None,
            eta_s=None if total_steps is None else max(total_steps - last, 0) * (seconds / (last - first)),
        )
