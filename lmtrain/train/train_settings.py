"""How long and how a run trains, and what it says about itself. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
    wandb: Literal["none", "offline", "online"] = "none"
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_name: str | None = None
    wandb_tags: tuple[str, ...] = ()
    histograms_every_steps: int | None = quantity("count", default=None)
    profile_steps: tuple[int, ...] | None = None
    profile_ranks: tuple[int, ...] | None = None
    peak_tflops: float | None = None
    trace: Literal["none", "sampled", "all"] = "sampled"

    def problems(self) -> Iterator[Problem]:
        yield from self.at_least(1, "log_interval_steps", "Use 1.")
        wrong = self.peak_tflops is not None and self.peak_tflops <= 0
        yield from self.problem_if(wrong, "peak_tflops", "must be above 0", "Use null for the known peak.")
        for key in ("wandb_project", "wandb_entity", "wandb_name", "wandb_tags"):
            unused = self.wandb == "none" and bool(getattr(self, key))
            yield from self.problem_if(
                unused, key, "is for Weights & Biases, and observe.wandb=none does not write there",
                f"Set observe.wandb=offline or online, or leave observe.{key} out.",
            )  # fmt: skip
        yield from self._histogram_problems()
        yield from self._profile_problems()

    def _histogram_problems(self) -> Iterator[Problem]:
        if self.histograms_every_steps is None:
            return
        yield from self.at_least(1, "histograms_every_steps", "Use null for none.")
        yield from self.problem_if(
            not self.tensorboard and self.wandb == "none", "histograms_every_steps",
            "has nowhere to go, with observe.tensorboard=false and observe.wandb=none",
            "Set observe.tensorboard=true, or leave it out.",
        )  # fmt: skip

    def _profile_problems(self) -> Iterator[Problem]:
        steps, ranks = self.profile_steps, self.profile_ranks
        wrong = steps is not None and (len(steps) != 2 or not 1 <= steps[0] <= steps[-1])
        rule = "is not the first and the last step of a window, counted from 1"
        yield from self.problem_if(wrong, "profile_steps", rule, "Use observe.profile_steps=[100,103].")
        if ranks is None:
            return
        yield from self.problem_if(
            steps is None, "profile_ranks", "says who is profiled, and observe.profile_steps=null that nobody is",
            "Add observe.profile_steps=[100,103], or leave it out.",
        )  # fmt: skip
        wrong = not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks)
        yield from self.problem_if(wrong, "profile_ranks", "is not a list of ranks", "Use observe.profile_ranks=[0].")


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
