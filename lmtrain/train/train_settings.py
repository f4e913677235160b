"""Settings for a run's length, its measurements and its records. Torch-free.

This module does not depend on which evaluation tasks exist: code that starts the run checks the tasks beforehand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from lmtrain.config.build_typed_settings import quantity
from lmtrain.config.settings_base import Facts, Problem, Settings, problem_if, setting, show
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.errors import example, leave_out, own, way
from lmtrain.placement.batch_rampup_settings import RampUpSettings

_LONGEST_NAME, _LONGEST_PATH = 255, 4000  # bytes; file systems allow 255 and 4096, and the run adds names of its own
MAX_BATCH = 1 << 24  # because: every process holds the ids of all samples of a step
_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_WRONG_CHARACTERS = re.compile(r"[^A-Za-z0-9_./-]+")
_EVAL_BATCH = 8
_TIMES = ("time_limit", "time_between_failures")


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    steps: int | None = quantity("count", default=None)
    tokens: int | None = quantity("count", default=None)
    global_batch: int = setting(per_stage=True)
    micro_batch: int = setting(per_stage=True, chosen_at_start=True)
    rampup: RampUpSettings | None = setting(default=None, per_stage=True)
    seed: int = 1234
    valid_interval_steps: int = quantity("count", default=0, affects="held_out")
    valid_samples: int = quantity("count", default=256, affects="measures")

    def problems(self) -> Iterator[Problem]:
        rule = f"and train.tokens={show(self.tokens)}: exactly one of them must be set"
        way_out = f"Set {way('.steps=1000')} or {way('.tokens=300B')}."
        if self.steps is not None and self.tokens is not None:
            way_out = f"Add {way('.steps=null')} to train for tokens, or {way('.tokens=null')} to train for steps."
        yield from self.checked(
            ((self.steps is None) == (self.tokens is None), "steps", rule, way_out),
            *(self.at_least(1, key) for key in ("steps", "tokens", "micro_batch", "valid_samples")),
            # because: a batch of one sample cannot be cut into micro-batches
            self.at_least(1, "global_batch", f"Use {own(max(self.micro_batch, 1))} or more."),
            self.at_least(0, "seed"),
            self.at_least(0, "valid_interval_steps", f"Use {own(0)} for none."),
            self.at_most(MAX_BATCH, "global_batch"),
        )


@dataclass(frozen=True, kw_only=True)
class ObserveSettings(Settings):
    field_facts: ClassVar[Facts] = Facts(affects="nothing")

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
        steps, ranks = self.profile_steps, self.profile_ranks
        nowhere = not self.tensorboard and self.wandb == "none"
        yield from self.checked(
            self.at_least(1, "log_interval_steps", f"Use {own(1)}."),
            self.above_0("peak_tflops", f"Use {own('null')} for the known peak."),
            *(
                (self.wandb == "none" and bool(getattr(self, key)), key,
                 "is for Weights & Biases, which observe.wandb=none turns off",
                 f"Set {way('.wandb=offline')} or {way('.wandb=online', shown='online')}, or "
                 f"{leave_out(shown=f'leave observe.{key} out')}.")
                for key in ("wandb_project", "wandb_entity", "wandb_name", "wandb_tags")
            ),
            self.at_least(1, "histograms_every_steps", f"Use {own('null')} for no histograms."),
            (self.histograms_every_steps is not None and nowhere, "histograms_every_steps",
             "needs a sink, and observe.tensorboard=false and observe.wandb=none turn all sinks off",
             f"Set {way('.tensorboard=true')}, or {leave_out(shown='leave observe.histograms_every_steps out')}."),
            (steps is not None and (len(steps) != 2 or not 1 <= steps[0] <= steps[-1]), "profile_steps",
             "is not a list of two steps, the first and the last to profile, counted from 1",
             f"Use {own(_nearest_window(steps or ()))}."),
            (ranks is not None and steps is None, "profile_ranks",
             "selects ranks to profile, and observe.profile_steps=null profiles none",
             f"Add {way('.profile_steps=[2,3]')}, or {leave_out(shown='leave it out')}."),
            (ranks is not None and (not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks)), "profile_ranks",
             "is not a list of ranks", f"Use {own(show(sorted({rank for rank in ranks or () if rank >= 0}) or [0]))}."),
        )  # fmt: skip


def _nearest_window(steps: tuple[int, ...]) -> str:
    """Return the list of two steps to profile that is meant by a list which is none: from its first step to its last.
    """
    window = [step for step in steps if step >= 1] or [2, 3]
    return show([min(window), max(window)])


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    field_facts: ClassVar[Facts] = Facts(affects="nothing")

    dir: str  # without the fact `path`, because the run is not read there: it is the run, for all its processes
    time_limit: float | None = quantity("seconds", default=None)  # from the start of the command
    time_between_failures: float | None = quantity("seconds", default=None)  # the dry run's assumption

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(
            (not self.dir.strip(), "dir", "is empty", f"Give a folder, such as {example('runs/NAME')}."),
            *(self.above_0(key, f"Use {own('4h')}, or null for none.") for key in _TIMES),
        )
        path, name = len(self.dir.encode()), max(len(part.encode()) for part in self.dir.split("/"))
        yield from problem_if(
            path > _LONGEST_PATH or name > _LONGEST_NAME, "dir", f"{self.dir[:40]}...",
            f"has {path} bytes, and its longest name {name}; at most {_LONGEST_PATH} and {_LONGEST_NAME} are allowed",
            "Give a shorter path, as in run.dir=runs/NAME.",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvalTask(Settings):
    """An evaluation task, the file it reads, and the name of its measures if that differs from the task's."""

    task: str  # a name from `lmtrain eval --list`
    data: str = setting(path="text")  # the file to read, or a dataset's prefix
    name: str | None = None  # name of the measures; null for the task's name

    @property
    def measure_name(self) -> str:
        """The name under which the measures are recorded: `name`, or else the task's."""
        return self.name or self.task

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(
            (not self.data.strip(), "data", "names no file", "Give the file that the task reads."),
            (self.name is not None and not _NAME.fullmatch(self.name), "name",
             "is not a valid name: letters, digits and . _ - only, in parts separated by single slashes",
             f"Use {own('/'.join(filter(None, _WRONG_CHARACTERS.sub('-', self.name or '').split('/'))) or 'a')}."),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    field_facts: ClassVar[Facts] = Facts(per_stage=True, affects="measures")

    tasks: tuple[EvalTask, ...] = ()
    interval_steps: int = quantity("count", default=0)
    batch_size: int = _EVAL_BATCH

    def problems(self) -> Iterator[Problem]:
        unused = "has no effect without eval.tasks"
        way_out = f"Give eval.tasks=[{{task: TASK, data: FILE}}], or {leave_out(shown='leave it out')}."
        yield from self.checked(
            self.at_least(0, "interval_steps", f"Use {own(0)} for the end of the run alone."),
            self.at_least(1, "batch_size", f"Use {own(_EVAL_BATCH)}."),
            (not self.tasks and self.interval_steps != 0, "interval_steps", unused, way_out),
            (not self.tasks and self.batch_size != _EVAL_BATCH, "batch_size", unused, way_out),
        )
        repeated = [name for name, times in Counter(task.measure_name for task in self.tasks).items() if times > 1]
        yield from problem_if(
            len(repeated) > 0, "tasks", ", ".join(repeated), "is the name of several entries",
            "Give each entry a name of its own, as in {task: perplexity, data: a.txt, name: a}.",
        )  # fmt: skip


def count_steps(train: TrainSettings, seq_len: int) -> int:
    """Return the number of steps of a run: train.steps, or else the smallest number of steps that reads
    train.tokens.
    """
    if train.steps is not None:
        return train.steps
    assert train.tokens is not None
    return BatchPlan(train.global_batch, train.rampup).steps_for(-(-train.tokens // seq_len))
