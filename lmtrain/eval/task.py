"""What an evaluation task is, how tasks are found (files in eval/tasks/ and plugins), and its result. Torch-free.

A task turns a file into requests, with the facts of its text, and turns sums over the answers into measures. It never
sees a model; the runner joins the two. Sums are kept item by item (a document, a line, a question), so that a measure
can be taken of any selection of items: of one source, of a resample, of those that two models differ on. A result has
everything needed to repeat it, and no key that says just "perplexity": each measure's name says what it is divided by.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lmtrain import __version__
from lmtrain.config.base import FROM_A_PLUGIN, modules
from lmtrain.errors import DataError, UsageError, nearest
from lmtrain.eval.texts import TextInput
from lmtrain.eval.windows import Request, Tokens
from lmtrain.tokenizer.base import Tokenizer

TASK_ROOM = "lmtrain.eval.tasks"
ONE_PROCESS = "one process"
NOT_PUBLISHED = "text_is_not_the_published"  # a note: the name of the file whose figures the id stands for
_WINDOWED = re.compile(r"(?P<task>.+)-s(?P<seq_len>[1-9]\d{0,8})")

Columns = dict[str, NDArray[np.float64]]  # by name, a number for each item; a measure follows from their sums
Sums = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a task is to prepare its file for."""

    tokenizer: Tokenizer
    seq_len: int  # the window: what the model is shown at once
    stride: int | None = None  # None: the task's own
    shortened: bool = False  # the model sees more than seq_len
    hashes: Mapping[str, str] = field(default_factory=dict)  # of published files by their names: their SHA-256

    def protocol(self, task: str, published: int | None = None) -> str:
        """The task's id, with the window where it is another than was published, or than the model's own."""
        named = self.shortened if published is None else self.seq_len != published
        return f"{task}-s{self.seq_len}" if named else task

    def refuse_stride(self, why: str) -> None:
        """Raise where a stride is asked for: `why` a task has no use for one."""
        if self.stride is not None:
            raise UsageError(f"--stride={self.stride} {why}. Leave it out.")


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
    groups: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # by source, the items that came from it

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

    id: str
    data: ClassVar[str]  # the file it needs
    published: ClassVar[str | None] = None  # and the name of the one whose figures its id stands for
    headline: ClassVar[str]  # the measure to read first
    recipe: ClassVar[dict[str, str]]
    causal: ClassVar[bool] = True  # it asks what comes next; else for tokens that are masked
    pairs: ClassVar[bool] = False  # it asks whether one segment follows another
    compares: ClassVar[bool]  # whether baselines can score the same targets
    version: str = "1"  # another where the same text and model would give another number
    seq_len: int | None = None  # the window, where the id names one

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


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """A count-based model on the same targets."""

    name: str
    nll_sum_nats: float
    bits_per_byte: float
    token_perplexity: float
    model_bits_ratio: float  # the model's bits per byte over this baseline's: below 1 the model is better
    model_token_perplexity_ratio: float


@dataclass(frozen=True, kw_only=True)
class Result(Facts):
    """A number and what it means: the facts of its text, the model's, and how it was counted."""

    task: str = ""
    protocol_version: str = "1"
    data: str
    num_targets: int
    num_items: int = 0
    seq_len: int
    dtype: str
    layout: str = ONE_PROCESS
    tokenizer_fingerprint: str
    nll_sum_nats: float
    headline: str
    measures: dict[str, float]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # empty where there is only one item
    intervals_rule: str = "none"
    loss_by_position: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0  # of scoring
    tokens_per_s: float = 0.0  # fed to the model in that time
    padding_share: float = 0.0  # of all that was fed
    lmtrain: str = __version__
    baselines: tuple[BaselineResult, ...] = ()
    groups: dict[str, dict[str, float]] = field(default_factory=dict)  # by source, its measures

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which knows no infinity: what is not finite becomes null."""
        return {key: finite(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Result:
        """As `to_dict` has it, but for what was not finite."""
        return cls(**{**plain, "baselines": tuple(BaselineResult(**one) for one in plain["baselines"])})


def finite(value: Any) -> Any:
    """The same with null for what is not a finite number."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def all_tasks() -> dict[str, Task]:
    """Every published task by its id: a `TASK` or `TASKS` of the folder's files and of a plugin's `*_task.py`."""
    return {
        task.id: task
        for module in modules(TASK_ROOM)
        for task in getattr(module, "TASKS", [module.TASK] if hasattr(module, "TASK") else [])
    }


def find_task(name: str) -> Task:
    """A published task, one of a family (a module's `named` makes it of its id), or either with its window: `-s512`."""
    tasks = all_tasks()
    if name in tasks:
        return tasks[name]
    for module in modules(TASK_ROOM):
        if hasattr(module, "named") and (task := module.named(name)) is not None:
            return cast(Task, task)
    windowed = _WINDOWED.fullmatch(name)
    if windowed and not _WINDOWED.fullmatch(windowed["task"]):
        task = copy(find_task(windowed["task"]))
        task.seq_len = int(windowed["seq_len"])
        return task
    if family := [one for one in tasks if one.startswith(f"{name}/")]:
        raise UsageError(f"--task={name} is measured in several ways. Choose one: {', '.join(family)}.")
    raise UsageError(f"--task={name} is not an evaluation task. {nearest(name, tasks)} {FROM_A_PLUGIN}")


def window_of(task: Task, sees: int, asked: int | None) -> int:
    """What the task's id names, or else what is asked for, or else all that the model `sees`."""
    if None not in (task.seq_len, asked) and task.seq_len != asked:
        raise UsageError(f"--seq-len={asked} is not the window that --task={task.id}-s{task.seq_len} names. Give one.")
    window = task.seq_len or asked or sees
    if window > sees:
        raise UsageError(
            f"A window of {window} tokens is more than this model sees, which is {sees}: it has learned no "
            f"position behind that, rotary ones included. Use a --seq-len of 1 to {sees}."
        )
    return window


def item_columns(known: Columns, answers: Answers) -> Columns:
    """Sums of the answers to each item's requests, and how many items there are whose targets were all most likely."""
    found = {
        name: sum_by_item(answers.item, getattr(answers, name), len(known["bytes"]))
        for name in ("nll", "targets", "greedy")
    }
    scored = found["targets"] > 0
    whole = scored & (found["greedy"] == found["targets"])
    return known | found | {"items": scored.astype(np.float64), "items_greedy": whole.astype(np.float64)}


def sum_by_item(item: NDArray[np.int64], values: NDArray[Any], count: int) -> NDArray[np.float64]:
    found = np.zeros(count)
    np.add.at(found, item, values)
    return found


def eod_id(tokenizer: Tokenizer) -> int:
    if tokenizer.eod_id is None:
        raise DataError("The tokenizer has no end-of-document token to put before a first token. Add one to it.")
    return tokenizer.eod_id


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
