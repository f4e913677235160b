"""The batch size of each step and the range of positions that the step reads. Called by the settings and the loader.

This file must not know samples or ranks; sample_dataset_interface.py maps a position to a sample.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from copy import copy
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
        self._segments: list[tuple[int, int, int]] = []  # first step, first position, batch size
        self._add(0, 0, global_batch, rampup)

    def continued(self, step: int, global_batch: int, rampup: RampUp | None = None) -> BatchPlan:
        """Return a new plan that equals this one in the steps before `step` and has batches of `global_batch` samples
        from there on, first the smaller ones of `rampup` if it is given. No sample position is skipped or read twice.
        """
        plan = copy(self)
        plan._segments = [segment for segment in self._segments if segment[0] < step]
        plan._add(step, self.range_of(step)[0], global_batch, rampup)
        return plan

    def sizes_between(self, first_step: int, end_step: int | None = None) -> list[int]:
        """Return the batch sizes of the steps `first_step` to `end_step` - 1 (None: all later steps), ascending. The
        parallel layout must divide each of them.
        """
        return sorted(self.count_steps(first_step, sys.maxsize if end_step is None else end_step))

    def count_steps(self, first_step: int, end_step: int) -> dict[int, int]:
        """Return a dict from batch size, in samples, to the number of steps with that batch size, for the steps
        `first_step` to `end_step` - 1.
        """
        ends = [segment[0] for segment in self._segments[1:]] + [sys.maxsize]
        counts: dict[int, int] = {}
        for (start, _, size), end in zip(self._segments, ends, strict=True):
            if (steps := min(end, end_step) - max(start, first_step)) > 0:
                counts[size] = counts.get(size, 0) + steps
        return counts

    def range_of(self, step: int) -> tuple[int, int]:
        """Return (first position, number of samples) of a step; steps are counted from 0."""
        first_step, first_position, size = self._segments[bisect_right(self._segments, (step, sys.maxsize)) - 1]
        return first_position + (step - first_step) * size, size

    def steps_for(self, num_samples: int, first_step: int = 0) -> int:
        """Return how many steps, counted from step `first_step` on, are needed to read at least `num_samples` samples.
        The result is at least 1.
        """
        target = self.range_of(first_step)[0] + num_samples
        low, high = 1, max(1, -(-num_samples // min(self.sizes_between(first_step))))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.range_of(first_step + middle)[0] >= target else (middle + 1, high)
        return low

    def _add(self, step: int, position: int, global_batch: int, rampup: RampUp | None) -> None:
        """Append segments (first step, first position, batch size): those of the ramp-up, if given, then one of
        `global_batch` samples per step. The first one begins at `step` and at `position`, the number of samples read
        before it.
        """
        if rampup is not None:
            start, sizes = position, _rampup_sizes(global_batch, rampup)
            for i, size in enumerate(sizes, 1):
                self._segments.append((step, position, size))
                steps = -(-max(start + rampup.samples * i // len(sizes) - position, 0) // size)
                step, position = step + steps, position + steps * size
        self._segments.append((step, position, global_batch))


def _rampup_sizes(global_batch: int, rampup: RampUp) -> range:
    """Return the batch sizes of a ramp-up, in samples: from `rampup.start` in steps of `rampup.increment`, without
    `global_batch` itself. Raise SettingsError if whole increments never give `global_batch`.
    """
    in_range = 1 <= rampup.start <= global_batch and rampup.increment >= 1
    if not in_range or (global_batch - rampup.start) % rampup.increment:
        raise SettingsError([
            f"A ramp-up from {rampup.start} by {rampup.increment} never reaches the global batch of {global_batch}. "
            "Give a smaller start and an increment that divides their difference."
        ])
    return range(rampup.start, global_batch, rampup.increment)
