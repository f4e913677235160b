"""The settings of a growing batch, the group train.rampup, and the check of its batch sizes against a layout.

Torch-free. `BatchPlan` (lmtrain/data/batch_size_per_step.py) computes the batch size of each step from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmtrain.config.build_typed_settings import quantity
from lmtrain.config.settings_base import Problem, Settings
from lmtrain.errors import way
from lmtrain.layout import Layout

MAX_INCREMENTS = 10_000  # because: code lists them all before a run begins, and no real run comes near


@dataclass(frozen=True, kw_only=True)
class RampUpSettings(Settings):
    """Grow the batch from `start` by `increment` samples until the global batch, over `samples` samples."""

    start: int
    increment: int
    samples: int = quantity("count")

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(
            *(self.at_least(1, key, "Give 1 or more.") for key in ("start", "increment")), self.at_least(1, "samples")
        )


def rampup_problems(
    layout: Layout, rampup: RampUpSettings, micro_batch: int, global_batch: int
) -> Iterator[Problem]:
    """Yield a Problem with a message for the start and the increment of a batch-size ramp-up, if it is not a multiple
    of `micro_batch` x data-parallel ranks. All batch sizes of the ramp-up can be divided if there is no problem.
    """
    together = micro_batch * layout.dp
    for key in ("start", "increment"):
        if (value := getattr(rampup, key)) % together != 0:
            rule = f"is not a multiple of micro_batch x copies = {together}"
            yield Problem(f"train.rampup.{key}", value, rule, way_to_reach(global_batch, rampup, together))


def way_to_reach(global_batch: int, rampup: RampUpSettings, together: int) -> str:
    """Return as a way out the ramp-up nearest to `rampup` whose start and increment are multiples of `together` and
    reach `global_batch` in at most MAX_INCREMENTS.
    """
    if global_batch % together or global_batch < 2 * together:
        return f"Give a train.global_batch of {2 * together} or another multiple of {together}."
    least = max(rampup.increment, -(-global_batch // MAX_INCREMENTS))
    increment = -(-least // together) * together
    increment = together if increment >= global_batch else increment
    count = min(max(round((global_batch - rampup.start) / increment), 1), (global_batch - 1) // increment)
    nearest = {"start": global_batch - count * increment, "increment": increment}
    words = [f"train.rampup.{key}={value}" for key, value in nearest.items() if value != getattr(rampup, key)]
    return f"Use {way(*words)}."
