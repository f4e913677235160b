"""Evaluation tasks: their interface, their lookup (files in eval/tasks/ and plugins), and results. Torch-free.

A task turns a file into requests, with the facts of its text, and turns sums over the answers into measures. A task
never has access to the model; the runner combines the two. Sums are kept by item (a document, a line, a question), so
that a measure can be computed for any selection of items: one source, a resample, the items on which two models differ.
A result contains everything needed to repeat it, and no key that is just "perplexity": each measure's name contains its
denominator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lmtrain import __version__
from lmtrain.config.settings_base import PLUGIN_WAY_OUT, load_modules
from lmtrain.errors import DataError, UsageError, leave_out, spelling_hint, way
from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.windows import Request, Tokens
from lmtrain.placement.parallel_settings import ONE_PROCESS
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

TASK_PACKAGE = "lmtrain.eval.tasks"
NOT_PUBLISHED = "text_is_not_the_published"  # a note: the file that the id's published figures are of
_WINDOWED = re.compile(r"(?P<task>.+)-s(?P<seq_len>[1-9]\d{0,8})")

Columns = dict[str, NDArray[np.float64]]  # by name, a value for each item; measures are computed from their sums
Sums = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options for which a task prepares its file."""

    tokenizer: Tokenizer
    seq_len: int  # the window: most tokens fed at once
    stride: int | None = None  # None: the task's default
    shortened: bool = False  # True if the model's window is longer than seq_len
    hashes: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of published files, by name

    def protocol_id(self, task: str, published: int | None = None) -> str:
        """Return the task's id, with the window appended if it differs from `published`; without `published`, if it is
        shorter than the model's.
        """
        is_appended = self.shortened if published is None else self.seq_len != published
        return f"{task}-s{self.seq_len}" if is_appended else task

    def refuse_any_stride(self, task_id: str) -> None:
        """Raise UsageError if the user has given a stride, because the windows of the task `task_id` do not overlap."""
        if self.stride is not None:
            raise UsageError(
                f"--stride={self.stride} does not apply to {task_id}, which has no overlapping windows. {leave_out()}."
            )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about an evaluated text and how it was counted, without which a result cannot be interpreted. Counts are of
    the whole text, before any window is cut.
    """

    protocol: str  # the task's id, with the options that make it another protocol
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
    limit: int | None = None  # number of items, if not all
    notes: dict[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A task's file, ready to be scored. `requests` may be iterated more than once, by the model and by baselines."""

    requests: Iterable[Request]
    num_targets: int
    facts: Facts
    text_columns: Columns  # columns that follow from the text alone, "bytes" at least
    documents: Iterable[Tokens] | None = None  # set if all tokens of each but the first are scored: for baselines
    groups: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # by source: the indices of its items

    @property
    def num_items(self) -> int:
        return len(self.text_columns["bytes"])


@dataclass(frozen=True)
class Answers:
    """The answers to all requests, as arrays in the order of the requests."""

    item: NDArray[np.int64]
    nll: NDArray[np.float64]  # nats, summed over the scored targets
    targets: NDArray[np.int64]  # number of scored targets
    greedy: NDArray[np.int64]  # number of targets that were the most likely token


class Task(Protocol):
    """Interface of an evaluation task. Most tasks need not override `columns`."""

    id: str
    data: ClassVar[str]  # description of the file it needs
    published: ClassVar[str | None] = None  # name of the file to which the figures published under its id belong
    headline: ClassVar[str]  # the measure shown first
    recipe: ClassVar[dict[str, str]]
    causal: ClassVar[bool] = True  # predicts the next token; otherwise masked tokens
    pairs: ClassVar[bool] = False  # asks whether one segment follows another
    compares: ClassVar[bool] = False  # True if baselines can score the same targets
    version: str = "1"  # changes if the same text and model would give another number
    seq_len: int | None = None  # the window, if the id names one
    files: Sequence[Path] = ()  # the files besides its data on which its numbers depend

    def prepare(self, source: Path, options: TaskOptions) -> Prepared:
        """Read a file, and return its requests and facts."""
        ...

    def columns(self, prepared: Prepared, answers: Answers) -> Columns:
        """Return the columns that `measures` sums up, a value per item; "nll" and "targets" are among them."""
        return item_columns(prepared.text_columns, answers)

    def measures(self, sums: Sums) -> dict[str, float]:
        """Return the measures, computed from sums of the columns over any selection of items."""
        ...


@runtime_checkable
class TextTask(Protocol):
    """A task on any documents, whatever files they came in; its `prepare` then receives only datasets."""

    def prepare_texts(self, texts: TextInput, options: TaskOptions) -> Prepared: ...


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """A count-based model's numbers on the same targets."""

    name: str
    nll_sum_nats: float
    bits_per_byte: float
    token_perplexity: float
    model_bits_ratio: float  # the model's bits per byte over the baseline's: below 1 the model is better
    model_token_perplexity_ratio: float


@dataclass(frozen=True, kw_only=True)
class Result(Facts):
    """A result with its meaning: the facts of its text, the facts of the model, and the rules of counting."""

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
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # empty for one item
    intervals_rule: str = "none"
    loss_by_position: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0  # time of scoring
    tokens_per_s: float = 0.0  # tokens fed per second of that time
    padding_share: float = 0.0  # fraction of all tokens fed
    lmtrain: str = __version__
    baselines: tuple[BaselineResult, ...] = ()
    groups: dict[str, dict[str, float]] = field(default_factory=dict)  # by source: its measures

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; non-finite numbers become null, because JSON has none."""
        return {key: finite_or_none(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Result:
        """Return the result of `to_dict`'s data; non-finite numbers stay None."""
        return cls(**{**plain, "baselines": tuple(BaselineResult(**baseline) for baseline in plain["baselines"])})


def finite_or_none(value: Any) -> Any:
    """Return a copy of plain data (dicts, lists, numbers, texts) in which each float that is not finite is replaced by
    None.
    """
    if isinstance(value, dict):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def all_tasks() -> dict[str, Task]:
    """Return task id -> task for all built-in evaluation tasks and those of plugins: the `TASK` or `TASKS` of each
    module in eval/tasks, and of each plugin's `*_task.py` file.
    """
    return {
        task.id: task
        for module in load_modules(TASK_PACKAGE)
        for task in getattr(module, "TASKS", [module.TASK] if hasattr(module, "TASK") else [])
    }


def find_task(name: str) -> Task:
    """Return the task `name`: an id, a file such as my_task.yaml, or either with a window appended, such as `-s512`.
    Raise UsageError if there is no such task.

    A module's function `named` decides on names other than the ids in its `TASKS`.
    """
    tasks = all_tasks()
    if name in tasks:
        return tasks[name]
    for module in load_modules(TASK_PACKAGE):
        if hasattr(module, "named") and (task := module.named(name)) is not None:
            return cast(Task, task)
    windowed = _WINDOWED.fullmatch(name)
    if windowed and not _WINDOWED.fullmatch(windowed["task"]):
        task = copy(find_task(windowed["task"]))
        task.seq_len = int(windowed["seq_len"])
        return task
    if family := [task_id for task_id in tasks if task_id.startswith(f"{name}/")]:
        tasks_of_it = ", ".join(way(member, instead_of=name) for member in family)
        raise UsageError(f"--task={name} stands for several tasks. Choose one of them: {tasks_of_it}.")
    if meant := _HARNESS_NAMES.get(name.lower()):
        raise UsageError(f"--task={name} is not an evaluation task. Did you mean {way(meant, instead_of=name)}?")
    if re.match(_HARNESS_TASKS, name.lower()):
        raise UsageError(
            f"--task={name} is no task here, but one of lm-evaluation-harness, which scores checkpoints as well: type "
            f"`python -m lmtrain.cli.harness run --model=lmtrain --model_args pretrained=RUN --tasks {name}`. Or give "
            "a task of `lmtrain eval --list`."
        )
    hint = spelling_hint(name, tasks, lambda meant: way(meant, instead_of=name))
    raise UsageError(f"--task={name} is not an evaluation task. {hint} {PLUGIN_WAY_OUT}")


# lm-evaluation-harness's names of tasks that there are
_HARNESS_NAMES = {
    "arc_easy": "choice/arc", "arc_challenge": "choice/arc", "arc": "choice/arc", "ai2_arc": "choice/arc",
    "lambada_openai": "lambada/lmeval-openai-1.0", "lambada_standard": "lambada/lmeval-standard-1.0",
    "wikitext": "wikitext2/lmeval-2.0", "wikitext2": "wikitext2/lmeval-2.0", "wikitext103": "wikitext103/lmeval-2.0",
    "ppl": "perplexity", "loss": "perplexity",
}  # fmt: skip
# the beginnings of the names of others
_HARNESS_TASKS = (
    "mmlu|gsm8k|winogrande|boolq|truthfulqa|openbookqa|bbh|humaneval|mbpp|triviaqa|squad|sciq|siqa|social_iqa|"
    "commonsense_qa|ceval|cmmlu|blimp|copa|wic|rte|cb$|glue|super_glue|superglue|ifeval|gpqa|math|mathqa|logiqa|drop|"
    "nq_open|naturalqs|coqa|anli|xnli|xcopa|xwinograd|headqa|pubmedqa|medqa|agieval|leaderboard|hendrycks|storycloze|"
    "asdiv|prost|pile|paloma|c4|swag|wsc|qa4mre|quac|race_|webqs|toxigen|crows_pairs|belebele|mgsm|minerva"
)


def choose_window(task: Task, model_seq_len: int, requested: int | None, stride: int | None = None) -> int:
    """Return how many tokens the model is fed at once: the number in the task's id, else `requested`, else
    `model_seq_len`. Raise UsageError if it is more than `model_seq_len`, or if the id and `requested` name different
    numbers; its way out shortens the typed `stride` of the windows by as much as the window.
    """
    if None not in (task.seq_len, requested) and task.seq_len != requested:
        raise UsageError(
            f"--seq-len={requested} contradicts the window in --task={task.id}-s{task.seq_len}. Leave out "
            f"{leave_out(shown='--seq-len')}, or the window of the task."
        )
    window = task.seq_len or requested or model_seq_len
    if window > model_seq_len:
        shorter = () if stride is None else ("--stride", str(max(1, min(stride, window) * model_seq_len // window)))
        fitting = way("--seq-len", str(model_seq_len), *shorter)
        if task.seq_len:
            fitting = way(f"{task.id}-s{model_seq_len}", instead_of=f"{task.id}-s{task.seq_len}")
        raise UsageError(
            f"A window of {window} tokens is longer than the {model_seq_len} positions that this model has learned, "
            f"also if they are rotary. Use {fitting} or less."
        )
    return window


def item_columns(text_columns: Columns, answers: Answers) -> Columns:
    """Return column name -> array with a value per item: `text_columns`, and sums over each item's requests of the
    losses ("nll"), the number of targets ("targets") and how many of them were the most likely token ("greedy").

    The column "items_greedy" is 1 for the items whose targets were all the most likely tokens.
    """
    sums = {
        name: sum_by_item(answers.item, getattr(answers, name), len(text_columns["bytes"]))
        for name in ("nll", "targets", "greedy")
    }
    scored = sums["targets"] > 0
    all_greedy = scored & (sums["greedy"] == sums["targets"])
    return text_columns | sums | {"items": scored.astype(np.float64), "items_greedy": all_greedy.astype(np.float64)}


def sum_by_item(item: NDArray[np.int64], values: NDArray[Any], num_items: int) -> NDArray[np.float64]:
    """Return the sum of `values` for each of `num_items` items; `item` has the index of each value's item."""
    sums = np.zeros(num_items)
    np.add.at(sums, item, values)
    return sums


def eod_id(tokenizer: Tokenizer) -> int:
    """Return the id of the end-of-document token. Raise DataError if the tokenizer has none."""
    if tokenizer.eod_id is None:
        raise DataError("The tokenizer has no end-of-document token, which must precede the first token. Add one.")
    return tokenizer.eod_id


def encode_pair(tokenizer: Tokenizer, context: str, target: str) -> tuple[list[int], list[int]]:
    """Return the token ids of `context` and of `target`, encoded together and then split after as many tokens as the
    context has by itself.

    Blanks at the end of the context belong to the target.
    """
    before = context.rstrip()
    ids = tokenizer.encode(before) if before else []
    return ids, tokenizer.encode(context + target)[len(ids) :]


def sum_columns(columns: Columns) -> dict[str, float]:
    return {name: float(values.sum()) for name, values in columns.items()}


def ratio(part: float, whole: float) -> float:
    """Return part / whole; NaN if `whole` is 0."""
    return part / whole if whole else math.nan


def perplexity(nll_sum_nats: float, count: float) -> float:
    """Return exp(`nll_sum_nats` / `count`); infinity if a float cannot hold it, NaN if `count` is 0."""
    if not count:
        return math.nan
    mean = nll_sum_nats / count
    return math.exp(mean) if mean < 700 else math.inf


def bits_per_byte(nll_sum_nats: float, num_bytes: float) -> float:
    return ratio(nll_sum_nats / math.log(2), num_bytes)


def check_kind(task: Task, *, causal: bool, pairs: bool) -> None:
    """Raise UsageError unless the model is of the kind that `task` needs. `causal` says that the model predicts the
    next token, rather than masked tokens; `pairs` that it can tell whether one segment of text follows another.
    """
    if task.causal == causal and pairs >= task.pairs:
        return
    fitting = [name for name, other in all_tasks().items() if other.causal == causal and pairs >= other.pairs]
    if task.causal and not causal:
        misfit = "scores the next token, but this model sees the tokens on both sides, and so the answer"
    elif causal:
        misfit = "scores masked tokens, but this model predicts the next token"
    else:
        misfit = "asks whether one segment follows another, but this model has no head for pairs"
    raise UsageError(
        f"--task={task.id} does not fit the model: it {misfit}. Give another model, or one of these tasks: "
        f"{', '.join(fitting)}."
    )
