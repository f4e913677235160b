"""How long and how a run trains, and what it says about itself. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmtrain.config.base import Problem, Settings, problem_if, show
from lmtrain.config.build import quantity

_LONGEST_NAME, _LONGEST_PATH = 255, 4000  # bytes; a file system takes 255 and 4096, and the run adds names of its own

MAX_BATCH = 1 << 24  # because: every process knows each sample of a step


@dataclass(frozen=True, kw_only=True)
class RampUpSettings(Settings):
    """Grow the batch from `start` by `increment` samples until the global batch, over `samples` samples."""

    start: int
    increment: int
    samples: int = quantity("count")

    def problems(self) -> Iterator[Problem]:
        for key in ("start", "increment", "samples"):
            yield from self.at_least(1, key, "Use train.rampup=null for none.")


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
        rule = f"and train.tokens={show(self.tokens)} must be given one without the other"
        way_out = "Set train.steps=1000 or train.tokens=300B."
        if self.steps is not None and self.tokens is not None:
            way_out = "Add train.steps=null to train for tokens, or train.tokens=null to train for steps."
        yield from self.problem_if((self.steps is None) == (self.tokens is None), "steps", rule, way_out)
        least = {"steps": 1, "tokens": 1, "global_batch": 1, "micro_batch": 1, "seed": 0, "valid_interval_steps": 0}
        for key, number in (least | {"valid_samples": 1}).items():
            yield from self.at_least(number, key, f"Use train.{key}={max(number, 1)} or more.")
        yield from self.at_most(MAX_BATCH, "global_batch")


@dataclass(frozen=True, kw_only=True)
class ObserveSettings(Settings):
    log_interval_steps: int = quantity("count", default=1)
    tensorboard: bool = True
    peak_tflops: float | None = None

    def problems(self) -> Iterator[Problem]:
        yield from self.at_least(1, "log_interval_steps", "Use 1.")
        wrong = self.peak_tflops is not None and self.peak_tflops <= 0
        yield from self.problem_if(wrong, "peak_tflops", "must be above 0", "Use null for the known peak.")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    dir: str
    time_limit: float | None = quantity("seconds", default=None)  # from the start of the command
    time_between_failures: float | None = quantity("seconds", default=None)  # what the dry run is to reckon with

    def problems(self) -> Iterator[Problem]:
        yield from self.problem_if(not self.dir.strip(), "dir", "is empty", "Use run.dir=runs/NAME.")
        for key in ("time_limit", "time_between_failures"):
            wrong = getattr(self, key) is not None and getattr(self, key) <= 0
            yield from self.problem_if(wrong, key, "must be above 0", f"Use run.{key}=4h, or null for none.")
        path, name = len(self.dir.encode()), max(len(part.encode()) for part in self.dir.split("/"))
        yield from problem_if(
            path > _LONGEST_PATH or name > _LONGEST_NAME, "dir", f"{self.dir[:40]}...",
            f"has {path} bytes, {name} of them in one name, and the most are {_LONGEST_PATH} and {_LONGEST_NAME}",
            "Use a shorter one, as in run.dir=runs/NAME.",
        )  # fmt: skip
