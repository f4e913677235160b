"""What an evaluation task is, and how tasks are found: a file in eval/tasks/ with a `TASK`, or a plugin's. Torch-free.

A task turns a file into requests, with the facts of its text, and turns the totals of the answers into measures. It
never sees a model; the runner joins the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from lmtrain.config.base import FROM_A_PLUGIN, modules
from lmtrain.errors import UsageError, nearest
from lmtrain.eval.texts import TextInput
from lmtrain.eval.windows import Request, Tokens
from lmtrain.tokenizer.base import Tokenizer

TASK_ROOM = "lmtrain.eval.tasks"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a number means nothing without. Counts are of the whole text, before any window is cut."""

    text_sha256: str
    num_documents: int
    num_words: int | None
    words_rule: str
    num_bytes: int
    bytes_rule: str
    num_tokens: int
    prefix: str
    stride: int | None
    denominator: str
    notes: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A task's file, ready to be scored. `requests` may be walked more than once, by the model and by baselines."""

    requests: Iterable[Request]
    num_targets: int
    facts: Facts
    documents: Iterable[Tokens] | None = None  # where all of each but its first token is scored: for baselines


@dataclass
class Totals:
    """Sums over every answer; any measure follows from these and the facts."""

    nll_sum_nats: float = 0.0
    num_targets: int = 0
    num_greedy: int = 0
    num_requests: int = 0
    num_requests_greedy: int = 0  # requests whose scored targets were all the argmax


class Task(Protocol):
    id: ClassVar[str]
    data: ClassVar[str]  # the file it needs
    headline: ClassVar[str]  # the measure to read first
    recipe: ClassVar[dict[str, str]]
    compares: ClassVar[bool]  # whether baselines can score the same targets

    def prepare(self, source: Path, tokenizer: Tokenizer, seq_len: int, stride: int | None) -> Prepared: ...

    def measures(self, facts: Facts, totals: Totals) -> dict[str, float]: ...


@runtime_checkable
class TextTask(Protocol):
    """A task that takes any documents, whatever files they came in; `prepare` then gets datasets alone."""

    def prepare_texts(self, texts: TextInput, tokenizer: Tokenizer, seq_len: int, stride: int | None) -> Prepared: ...


def all_tasks() -> dict[str, Task]:
    """Every task by its id: the files of the folder, and a plugin's `*_task.py`."""
    return {module.TASK.id: module.TASK for module in modules(TASK_ROOM) if hasattr(module, "TASK")}


def find_task(name: str) -> Task:
    tasks = all_tasks()
    if name not in tasks:
        raise UsageError(f"--task={name} is not an evaluation task. {nearest(name, tasks)} {FROM_A_PLUGIN}")
    return tasks[name]


def perplexity(nll_sum_nats: float, count: int) -> float:
    """exp(nll / count); infinity where a float cannot hold it, not a number where nothing was scored."""
    if not count:
        return math.nan
    mean = nll_sum_nats / count
    return math.exp(mean) if mean < 700 else math.inf


def bits_per_byte(nll_sum_nats: float, num_bytes: int) -> float:
    return nll_sum_nats / math.log(2) / num_bytes if num_bytes else math.nan
