"""What a run measures while it trains, besides its validation. Torch-free.

Which tasks there are is not known here: whoever starts the run asks them, before it begins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmtrain.config.base import Problem, Settings, problem_if
from lmtrain.config.build import quantity

_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_BATCH = 8
_EXAMPLE = "Use eval.tasks=[{task: lambada/megatron-strict, data: lambada_test.jsonl}]"


@dataclass(frozen=True, kw_only=True)
class EvalTask(Settings):
    """A task, the file that it reads, and what its measures are called where that is not the task's own name."""

    task: str  # as `lmtrain eval --list` names it
    data: str  # the file that it reads, or a dataset's prefix
    name: str | None = None  # what its measures are called; null for the task's own name

    @property
    def called(self) -> str:
        return self.name or self.task

    def problems(self) -> Iterator[Problem]:
        yield from self.checked(
            (not self.data.strip(), "data", "names no file", "Give the file that the task reads."),
            (self.name is not None and not _NAME.fullmatch(self.name), "name",
             "is no name, which is letters, digits and . _ - in parts between slashes",
             "Use one such as wiki, or leave it out."),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Settings):
    tasks: tuple[EvalTask, ...] = ()
    interval_steps: int = quantity("count", default=0)
    batch_size: int = _BATCH

    def problems(self) -> Iterator[Problem]:
        unused, way_out = "measures nothing without eval.tasks", f"{_EXAMPLE}, or leave it out."
        yield from self.checked(
            self.at_least(0, "interval_steps", "Use 0 for the end of the run alone."),
            self.at_least(1, "batch_size", f"Use {_BATCH}."),
            (not self.tasks and self.interval_steps != 0, "interval_steps", unused, way_out),
            (not self.tasks and self.batch_size != _BATCH, "batch_size", unused, way_out),
        )
        twice = [name for name, times in Counter(one.called for one in self.tasks).items() if times > 1]
        yield from problem_if(
            len(twice) > 0, "tasks", ", ".join(twice), "names several measures",
            "Give each entry a name of its own, as in {task: perplexity, data: a.txt, name: a}.",
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"tasks": [one.to_dict() for one in self.tasks]}
