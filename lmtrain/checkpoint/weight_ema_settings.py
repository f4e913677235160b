"""Settings of the exponential average of the weights: the group checkpoint.ema. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmtrain.config.build_typed_settings import quantity
from lmtrain.config.settings_base import Problem, Settings
from lmtrain.errors import leave_out, own, way


@dataclass(frozen=True, kw_only=True)
class WeightAverageSettings(Settings):
    decay: float | None = None  # the share of the average that stays at an update; null: no average
    every_steps: int = quantity("count", default=1)  # the average is updated at the multiples of this number of steps
    from_step: int = quantity("count", default=0)  # the step after which it begins as a copy of the weights

    @property
    def is_on(self) -> bool:
        return self.decay is not None

    def covers(self, step: int) -> bool:
        """Return True if a run has an average after `step` steps."""
        return self.is_on and step >= self.from_step

    def first_measured_step(self, interval: int) -> int:
        """Return the first multiple of `interval`, a number of steps, after which there is an average to measure."""
        return -(-max(self.from_step, 1) // interval) * interval

    def problems(self) -> Iterator[Problem]:
        unused = "has no effect, since with decay=null no average is kept"
        way_out = f"Use {way('.decay=0.999')}, or {leave_out(shown='leave it out')}."
        yield from self.checked(
            (self.decay is not None and not 0 < self.decay < 1, "decay", "is not between 0 and 1",
             f"Use {own(0.999)} for an average over about the last 1,000 updates, or null for none."),
            self.at_least(1, "every_steps", f"Use {own(1)} to update the average at every step."),
            self.at_least(0, "from_step", f"Use {own(0)} to begin with the first weights."),
            (not self.is_on and self.every_steps > 1, "every_steps", unused, way_out),
            (not self.is_on and self.from_step > 0, "from_step", unused, way_out),
        )  # fmt: skip

    def problems_in_run(self, steps: int) -> Iterator[Problem]:
        """Yield a problem if the average of the weights is on, and a run of `steps` steps would end before it begins or
        before it is first updated.
        """
        if not self.is_on:
            return
        first_update = (self.from_step // self.every_steps + 1) * self.every_steps
        yield from self.checked(
            (self.from_step >= steps, "from_step",
             f"is not below the run's {steps} steps, so that it would end without an average",
             "Give a smaller one."),
            (self.from_step < steps < first_update, "every_steps",
             f"first updates the average after step {first_update}, and the run ends after step {steps}",
             "Give a smaller one."),
        )  # fmt: skip
