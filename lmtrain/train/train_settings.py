"""How long and how a run trains, and what it says about itself. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmtrain.config.base import Problem, Settings, problem_if, show
from lmtrain.config.build import quantity


@dataclass(frozen=True, kw_only=True)
class RampUpSettings(Settings):
    """Grow the batch from `start` by `increment` samples until the global batch, over `samples` samples."""

    start: int
    increment: int
    samples: int = quantity("count")

    def problems(self) -> Iterator[Problem]:
        for key in ("start", "increment", "samples"):
            value = getattr(self, key)
            yield from problem_if(value < 1, key, value, "must be at least 1", "Use train.rampup=null for none.")


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    steps: int | None = quantity("count", default=None)
    tokens: int | None = quantity("count", default=None)
    global_batch: int
    micro_batch: int
    rampup: RampUpSettings | None = None
    seed: int = 1234
    valid_interval_steps: int = quantity("count", default=0)
    valid_samples: int = quantity("count", default=256)

    def problems(self) -> Iterator[Problem]:
        yield from problem_if(
            (self.steps is None) == (self.tokens is None),
            "steps",
            self.steps,
            f"and train.tokens={show(self.tokens)} must be given one without the other",
            "Set train.steps=1000 or train.tokens=300B.",
        )
        for key, least in (
            ("steps", 1),
            ("tokens", 1),
            ("global_batch", 1),
            ("micro_batch", 1),
            ("seed", 0),
            ("valid_interval_steps", 0),
            ("valid_samples", 1),
        ):
            value = getattr(self, key)
            wrong = value is not None and value < least
            way_out = f"Use train.{key}={max(least, 1)} or more."
            yield from problem_if(wrong, key, value, f"must be at least {least}", way_out)


@dataclass(frozen=True, kw_only=True)
class ObserveSettings(Settings):
    log_interval_steps: int = quantity("count", default=1)
    tensorboard: bool = True
    peak_tflops: float | None = None

    def problems(self) -> Iterator[Problem]:
        yield from problem_if(
            self.log_interval_steps < 1, "log_interval_steps", self.log_interval_steps, "must be at least 1", "Use 1."
        )
        wrong = self.peak_tflops is not None and self.peak_tflops <= 0
        yield from problem_if(wrong, "peak_tflops", self.peak_tflops, "must be above 0", "Use null for the known peak.")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    dir: str

    def problems(self) -> Iterator[Problem]:
        yield from problem_if(not self.dir.strip(), "dir", self.dir, "is empty", "Use run.dir=runs/NAME.")
