"""What an evaluation task is, and how tasks are found: a file in eval/tasks/ with a `TASK`, or a plugin's. Torch-free.

A task turns a file into requests, with the facts of its text, and turns sums over the answers into measures. It never
sees a model; the runner joins the two. Sums are kept item by item (a document, a line, a question), so that a measure
can be taken of any selection of items: of one source, of a resample, of those that two models differ on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lmtrain.config.base import FROM_A_PLUGIN, modules
from lmtrain.errors import UsageError, nearest
from lmtrain.eval.texts import TextInput
from lmtrain.eval.windows import Request, Tokens
from lmtrain.tokenizer.base import Tokenizer

TASK_ROOM = "lmtrain.eval.tasks"

Columns = dict[str, NDArray[np.float64]]  # by name, a number for each item; a measure follows from their sums
Sums = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a task is to prepare its file for."""

    tokenizer: Tokenizer
    seq_len: int  # what the model sees at once
    stride: int | None = None  # None: the task's own


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a number means nothing without. Counts are of the whole text, before any window is cut."""

    protocol: str  # the task's id, with whatever of the call makes it another protocol
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
    limit: int | None = None  # how many items, where it is not all of them
    notes: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A task's file, ready to be scored. `requests` may be walked more than once, by the model and by baselines."""

    requests: Iterable[Request]
    num_targets: int
    facts: Facts
    known: Columns  # of every item what the text alone says, "bytes" at least: its words, its bytes
    documents: Iterable[Tokens] | None = None  # where all of each but its first token is scored: for baselines

    @property
    def num_items(self) -> int:
        return len(self.known["bytes"])


@dataclass(frozen=True)
class Answers:
    """What the model made of each request, in their order."""

    item: NDArray[np.int64]
    nll: NDArray[np.float64]  # nats, over the scored targets
    targets: NDArray[np.int64]  # how many were scored
    greedy: NDArray[np.int64]  # how many of them were the most likely token


class Task(Protocol):
    """Subclass it: `columns` has the form that most tasks need."""

    id: ClassVar[str]
    version: ClassVar[str] = "1"  # goes up when the same file and model come to another number
    data: ClassVar[str]  # the file it needs
    headline: ClassVar[str]  # the measure to read first
    recipe: ClassVar[dict[str, str]]
    causal: ClassVar[bool] = True  # it asks what comes next; else for tokens that are masked
    compares: ClassVar[bool]  # whether baselines can score the same targets

    def prepare(self, source: Path, asked: Asked) -> Prepared: ...

    def columns(self, prepared: Prepared, answers: Answers) -> Columns:
        """Of every item what `measures` adds up; "nll" and "targets" are among them."""
        return item_columns(prepared.known, answers)

    def measures(self, sums: Sums) -> dict[str, float]:
        """From the sums of the columns over any items."""
        ...


@runtime_checkable
class TextTask(Protocol):
    """A task that takes any documents, whatever files they came in; `prepare` then gets datasets alone."""

    def prepare_texts(self, texts: TextInput, asked: Asked) -> Prepared: ...


def all_tasks() -> dict[str, Task]:
    """Every task by its id: the files of the folder, and a plugin's `*_task.py`."""
    return {module.TASK.id: module.TASK for module in modules(TASK_ROOM) if hasattr(module, "TASK")}


def find_task(name: str) -> Task:
    tasks = all_tasks()
    if name not in tasks:
        raise UsageError(f"--task={name} is not an evaluation task. {nearest(name, tasks)} {FROM_A_PLUGIN}")
    return tasks[name]


def item_columns(known: Columns, answers: Answers) -> Columns:
    """Sums of the answers to each item's requests, and how many items there are whose targets were all most likely."""
    count = len(known["bytes"])
    of = {"nll": answers.nll, "targets": answers.targets, "greedy": answers.greedy}
    found: Columns = {name: np.zeros(count) for name in of}
    for name, values in of.items():
        np.add.at(found[name], answers.item, values)
    scored = found["targets"] > 0
    whole = scored & (found["greedy"] == found["targets"])
    return known | found | {"items": scored.astype(np.float64), "items_greedy": whole.astype(np.float64)}


def sum_up(columns: Columns) -> dict[str, float]:
    return {name: float(values.sum()) for name, values in columns.items()}


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def perplexity(nll_sum_nats: float, count: float) -> float:
    """exp(nll / count); infinity where a float cannot hold it, not a number where nothing was scored."""
    if not count:
        return math.nan
    mean = nll_sum_nats / count
    return math.exp(mean) if mean < 700 else math.inf


def bits_per_byte(nll_sum_nats: float, num_bytes: float) -> float:
    return ratio(nll_sum_nats / math.log(2), num_bytes)
