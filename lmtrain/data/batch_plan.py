"""The batch size of each step and the range of positions that the step reads. Called by the settings and the loader.

This file must not know samples or ranks; dataset.py maps a position to a sample.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from typing import Protocol

from lmtrain.errors import SettingsError


class RampUp(Protocol):
    """Ramp-up of the global batch: from `start` samples by `increment`, evenly over the first `samples` samples."""

    @property
    def start(self) -> int: ...
    @property
    def increment(self) -> int: ...
    @property
    def samples(self) -> int: ...


class BatchPlan:
    """Mapping from a step to the positions it reads. Consecutive steps leave no gap, also during a ramp-up."""

    def __init__(self, global_batch: int, rampup: RampUp | None = None) -> None:
        self.global_batch = global_batch
        self._stages: list[tuple[int, int, int]] = []  # first step, first position, batch size
        step = position = 0
        if rampup is not None:
            sizes = _rampup_sizes(global_batch, rampup)
            for i, size in enumerate(sizes, 1):
                self._stages.append((step, position, size))
                steps = -(-max(rampup.samples * i // len(sizes) - position, 0) // size)
                step, position = step + steps, position + steps * size
        self._stages.append((step, position, global_batch))

    @property
    def sizes(self) -> list[int]:
        """The batch sizes of the run, ascending. The parallel layout must divide each of them."""
        return sorted({size for _, _, size in self._stages})

    def range_of(self, step: int) -> tuple[int, int]:
        """Return (first position, number of samples) of a step; steps are counted from 0."""
        first_step, first_position, size = self._stages[bisect_right(self._stages, (step, sys.maxsize)) - 1]
        return first_position + (step - first_step) * size, size


def _rampup_sizes(global_batch: int, rampup: RampUp) -> range:
    """Return the batch sizes of a ramp-up, in samples: from `start` by `increment`, below `global_batch`. Raise
    SettingsError if whole increments never give `global_batch`.
    """
    in_range = 1 <= rampup.start <= global_batch and rampup.increment >= 1
    if not in_range or (global_batch - rampup.start) % rampup.increment:
        raise SettingsError([
            f"A ramp-up from {rampup.start} by {rampup.increment} never reaches the global batch of {global_batch}. "
            "Use a smaller start and an increment that divides their difference."
        ])
    return range(rampup.start, global_batch, rampup.increment)
