"""Learning-rate schedules: a factor in [0, 1] of the peak as a pure function of the step. Torch-free.

Called by train once per step, and by the plots of the planner and tests. Steps count from 0. The first warm-up step
already has the factor 1/warmup_steps, and the last step comes just before the end value, so that no step is wasted at
0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from lmtrain.config.build_typed_settings import quantity
from lmtrain.config.settings_base import Choice, Facts, Problem, problem_if
from lmtrain.errors import own


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Choice):
    package: ClassVar[str] = "lmtrain.optim"
    field_facts: ClassVar[Facts] = Facts(per_stage=True)

    warmup_steps: int = quantity("count", default=0)

    def factor(self, step: int, total_steps: int) -> float:
        """Return the learning rate at the step `step`, counted from 0, as a share of the peak learning rate: a factor
        in [0, 1]. `total_steps` is the length of the run.
        """
        return (step + 1) / self.warmup_steps if step < self.warmup_steps else self.after_warmup(step, total_steps)

    @property
    def start_step(self) -> int:
        """The step from which `after_warmup` measures; a run whose steps differ in tokens gives it in tokens, as
        `warmup_steps`.
        """
        return self.warmup_steps

    @abstractmethod
    def after_warmup(self, step: int, total_steps: int) -> float:
        """Return the learning rate at a step from `warmup_steps` on, as a share of the peak; it is 1 at step
        `warmup_steps`.
        """

    def problems(self) -> Iterator[Problem]:
        way_out = f"Use {own(0)} for no warm-up."
        yield from self.problem_if(self.warmup_steps < 0, "warmup_steps", "must be 0 or more", way_out)
        floor = getattr(self, "min_ratio", 0.0)
        yield from problem_if(not 0 <= floor <= 1, "min_ratio", floor, "must lie in [0, 1]", f"Use {own(0.1)}.")

    def problems_in_run(self, total_steps: int) -> Iterator[Problem]:
        """Yield a problem for each setting that does not fit a run of `total_steps` steps, such as a warm-up that lasts
        all of it.
        """
        yield from self.problem_if(
            self.warmup_steps >= total_steps, "warmup_steps",
            f"must be less than the run's {total_steps} steps",
            f"Use {own(min(total_steps // 10, self.longest_warm_up(total_steps)))}, or train longer.",
        )  # fmt: skip

    def longest_warm_up(self, total_steps: int) -> int:
        """Return the most warm-up steps that fit in a run of `total_steps` steps."""
        return total_steps - 1

    def progress(self, step: int, total_steps: int) -> float:
        """Return the share of the steps after warm-up that is done: 0 when warm-up ends, 1 when the run ends."""
        return min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))


@dataclass(frozen=True, kw_only=True)
class ConstantSettings(ScheduleSettings):
    kind: ClassVar[str] = "constant"

    def after_warmup(self, step: int, total_steps: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class LinearSettings(ScheduleSettings):
    kind: ClassVar[str] = "linear"
    min_ratio: float = 0.0

    def after_warmup(self, step: int, total_steps: int) -> float:
        return _interpolate_to_1(self.min_ratio, 1.0 - self.progress(step, total_steps))


@dataclass(frozen=True, kw_only=True)
class CosineSettings(ScheduleSettings):
    kind: ClassVar[str] = "cosine"
    min_ratio: float = 0.1

    def after_warmup(self, step: int, total_steps: int) -> float:
        return _interpolate_to_1(self.min_ratio, 0.5 * (1.0 + math.cos(math.pi * self.progress(step, total_steps))))


@dataclass(frozen=True, kw_only=True)
class InverseSqrtSettings(ScheduleSettings):
    """The factor sqrt(warmup / step), independent of the run's length, so that a run can always be extended."""

    kind: ClassVar[str] = "inverse_sqrt"
    min_ratio: float = 0.0

    @property
    def start_step(self) -> int:
        return max(1, self.warmup_steps)

    def after_warmup(self, step: int, total_steps: int) -> float:
        start = self.start_step
        return max(self.min_ratio, math.sqrt(start / max(start, step)))


@dataclass(frozen=True, kw_only=True)
class WSDSettings(ScheduleSettings):
    """Warm-up, a stable phase, and a decay in the last part: a stable run can be finished at several lengths.

    The first of n decay steps has the factor 1. The last has, with min_ratio=0, 1/n if the decay is linear, about
    1/(2n) if it is sqrt and about 2.5/n^2 if it is cosine; a step more would have 0.
    """

    kind: ClassVar[str] = "wsd"
    decay_fraction: float = 0.2
    decay: Literal["linear", "sqrt", "cosine"] = "linear"
    min_ratio: float = 0.0

    def decay_start(self, total_steps: int) -> int:
        """Return the step at which the decay begins."""
        return total_steps - round(self.decay_fraction * total_steps)

    def after_warmup(self, step: int, total_steps: int) -> float:
        start = self.decay_start(total_steps)
        decayed = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
        match self.decay:
            case "linear":
                share = 1.0 - decayed
            case "sqrt":
                share = 1.0 - math.sqrt(decayed)
            case "cosine":
                share = 0.5 * (1.0 + math.cos(math.pi * decayed))
        return _interpolate_to_1(self.min_ratio, share)

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self.problem_if(
            not 0 <= self.decay_fraction <= 1, "decay_fraction", "must lie in [0, 1]", f"Use {own(0.2)}."
        )

    def longest_warm_up(self, total_steps: int) -> int:
        return min(super().longest_warm_up(total_steps), self.decay_start(total_steps))

    def problems_in_run(self, total_steps: int) -> Iterator[Problem]:
        yield from super().problems_in_run(total_steps)
        start = self.decay_start(total_steps)
        yield from self.problem_if(
            start < self.warmup_steps < total_steps, "warmup_steps",
            f"ends after the decay begins at step {start} of {total_steps}",
            f"Use {own(start)} or less, or a smaller decay_fraction.",
        )


def _interpolate_to_1(floor: float, share: float) -> float:
    """Return the value at `share` of the way from `floor` to 1."""
    return floor + (1.0 - floor) * share
