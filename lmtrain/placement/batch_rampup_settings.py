"""The settings of a growing batch, the group train.rampup, and the check of its batch sizes against a layout.

Torch-free. `BatchPlan` (lmtrain/data/batch_size_per_step.py) computes the batch size of each step from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmtrain.config.build_typed_settings import quantity
from lmtrain.config.settings_base import Problem, Settings
from lmtrain.layout import Layout


@dataclass(frozen=True, kw_only=True)
class RampUpSettings(Settings):
    """Grow the batch from `start` by `increment` samples until the global batch, over `samples` samples."""

    start: int
    increment: int
    samples: int = quantity("count")

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(
            *(self.at_least(1, key, "Use train.rampup=null for none.") for key in ("start", "increment", "samples"))
        )


def rampup_problems(layout: Layout, rampup: RampUpSettings, micro_batch: int) -> Iterator[Problem]:
    """Yield a Problem with a message for the start and the increment of a batch-size ramp-up, if it is not a multiple
    of `micro_batch` x data-parallel ranks. All batch sizes of the ramp-up can be divided if there is no problem.
    """
    together = micro_batch * layout.dp
    for key in ("start", "increment"):
        if (value := getattr(rampup, key)) % together != 0:
            rule = f"is not a multiple of micro_batch x copies = {together}"
            yield Problem(f"train.rampup.{key}", value, rule, f"Use {together}.")
