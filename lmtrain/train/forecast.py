"""What the planner expects of a run: how long a step takes, and what the fullest rank holds. Torch-free.

Called by the dry run, by a run that compares itself with it after some steps, and where a layout is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lmtrain.models.model_settings import ModelSettings
from lmtrain.observe.words import milliseconds
from lmtrain.plan.case import columns
from lmtrain.plan.hardware import Hardware
from lmtrain.plan.ours import Planned, case_of
from lmtrain.train.config import RunConfig
from lmtrain.units import format_bytes

COMPARED_STEPS = 20  # of this attempt, the first of them left out: it compiles, fills caches and makes memory


@dataclass(frozen=True)
class StepForecast:
    """Seconds: four of five runs come to lie between low and high."""

    likely: float
    low: float
    high: float

    def words(self) -> str:
        return f"{milliseconds(self.likely)} ({milliseconds(self.low)} to {milliseconds(self.high)})"
