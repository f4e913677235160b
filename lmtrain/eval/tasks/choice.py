"""Multiple choice tasks: the answer is the choice with the highest likelihood after the question.

Each task is a YAML file: the built-in ones are in this folder, and a user's file is named by its path (`--task
my_task.yaml`). A choice is tokenized together with its question, as lm-evaluation-harness does, and both are cut on the
left if they are too long.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, SettingsError, UsageError, spelling_hint
from lmtrain.eval.recipes.choice_recipe import SUFFIXES, Question, Recipe, read_recipe
from lmtrain.eval.task import Answers, Asked, Columns, Facts, Prepared, Sums, Task, eod_id, item_columns, ratio
from lmtrain.eval.texts import oddities, read_text_file
from lmtrain.eval.windows import Request
from lmtrain.runtime.files.files import parse_json
from lmtrain.tokenizer.base import Tokenizer

BETWEEN_SHOTS = "\n\n"
SECOND = {"characters": "per_character_accuracy", "bytes": "per_byte_accuracy"}


@dataclass(frozen=True)
class ChoiceRequest(Request):
    """A choice of the question that is its item."""

    length: float = 1.0  # of the choice, in the unit by which the second accuracy divides


class Choice(Task):
    headline = "accuracy"
    compares: ClassVar[bool] = False

    def __init__(self, recipe: Recipe) -> None:
        self.asks, self.id, self.version, self.data = recipe, recipe.id, recipe.version, recipe.data
        self.recipe = {
            "question": repr(recipe.question),
            "answer": f"{recipe.between!r} and a choice, tokenized together with the question",
            "right": "the likeliest choice, of several that are alike the first; "
            + (f"in {SECOND[recipe.normalisation]}, after dividing its log-likelihood by its {recipe.normalisation}"
               if recipe.normalisation in SECOND else "nothing is divided by a length"),
            "shots": _shots_rule(recipe),
            "long rows": "cut on the left to seq_len + 1 tokens",
        }  # fmt: skip

    def prepare(self, source: Path, asked: Asked) -> Prepared:
        asked.refuse_stride(f"means nothing to {self.id}, which has no windows")
        content, sha256 = read_text_file(source)
        questions = list(self._questions(content, source))
        shots = Shots.read(self, questions)
        rows: list[Request] = []
        cut = 0
        for item, one in enumerate(questions):
            before = shots.before(one)
            for choice in one.choices:
                context, target = encode_pair(asked.tokenizer, before + one.text, self.asks.between + choice)
                if not 1 <= len(target) <= asked.seq_len:
                    raise DataError(
                        f"{source} line {one.line}: the answer {choice[:40]!r} is {len(target)} tokens, and the model "
                        f"sees {asked.seq_len}. Use a tokenizer that knows the text or a longer window."
                    )
                ids = (context or [eod_id(asked.tokenizer)]) + target
                cut += len(ids) > asked.seq_len + 1
                length = float(len(choice.encode() if self.asks.normalisation == "bytes" else choice))
                tokens = np.array(ids[-(asked.seq_len + 1) :], np.int64)
                rows.append(ChoiceRequest(tokens, len(target), item, length=length))
        num_bytes = np.array([sum(len(choice.encode()) for choice in one.choices) for one in questions], np.float64)
        return Prepared(
            requests=rows,
            num_targets=sum(row.num_scored for row in rows),
            known={
                "bytes": num_bytes,
                "answer": np.array([one.answer for one in questions], np.float64),
                "chance": np.array([1 / len(one.choices) for one in questions]),
            },
            facts=Facts(
                protocol=asked.protocol(self.id + (f"-{self.asks.shots}shot" if self.asks.shots else "")),
                text_sha256=sha256,
                num_documents=len(questions),
                num_words=None,
                words_rule="not counted",
                num_bytes=int(num_bytes.sum()),
                bytes_rule="UTF-8 bytes of the choices",
                num_tokens=sum(len(row.tokens) for row in rows),
                prefix="none (an empty question: end of document)",
                stride=None,
                denominator=f"questions = {len(questions)}",
                notes={
                    "question": self.recipe["question"],
                    "shots": shots.said,
                    "rows_cut_on_the_left": cut,
                    **oddities(content),
                },
            ),
        )

    def columns(self, prepared: Prepared, answers: Answers) -> Columns:
        found = item_columns(prepared.known, answers)
        chosen = likeliest(answers.item, answers.nll)
        found |= {"chosen": chosen, "items_greedy": (chosen == found["answer"]).astype(np.float64)}
        if self.asks.normalisation in SECOND:
            lengths = np.array([getattr(request, "length", 1.0) for request in prepared.requests])
            by_length = likeliest(answers.item, answers.nll / lengths)
            found["items_by_length"] = (by_length == found["answer"]).astype(np.float64)
        return found

    def measures(self, sums: Sums) -> dict[str, float]:
        found = {"accuracy": ratio(sums["items_greedy"], sums["items"])}
        if "items_by_length" in sums:
            found[SECOND[self.asks.normalisation]] = ratio(sums["items_by_length"], sums["items"])
        return found | {"chance_accuracy": ratio(sums["chance"], sums["items"])}

    def _questions(self, content: str, source: Path) -> Iterator[Question]:
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                yield from self.asks.questions(_json(line, source, number), source, number)


@dataclass(frozen=True)
class Shots:
    """Answered questions to put before other questions."""

    rows: Sequence[Question]  # in the order in which they are used
    count: int
    between: str
    said: str

    @classmethod
    def read(cls, task: Choice, questions: Sequence[Question]) -> Shots:
        asks = task.asks
        if not asks.shots or asks.shots_file is None:
            return cls((), 0, asks.between, "none")
        content, sha256 = read_text_file(asks.shots_file)
        rows = list(task._questions(content, asks.shots_file))
        if asks.shots_seed is not None:
            rows = [rows[place] for place in drawn_order(len(rows), asks.shots_seed)]
        known = Counter(map(_key, rows))
        others = len(rows) - max((known[_key(one)] for one in questions), default=0)
        if others < asks.shots:
            raise DataError(
                f"{asks.shots_file} has {others} questions other than the one that is asked, and "
                f"{asks.at.get('shots', task.id)} asks for {asks.shots}. Use fewer shots, or add rows."
            )
        return cls(rows, asks.shots, asks.between, f"{_shots_rule(asks)}, sha256 {sha256}")

    def before(self, question: Question) -> str:
        """Return the first `count` questions that differ from this one, each with its answer, as a text."""
        others = islice((row for row in self.rows if _key(row) != _key(question)), self.count)
        return "".join(f"{row.text}{self.between}{row.choices[row.answer]}{BETWEEN_SHOTS}" for row in others)


def _key(question: Question) -> tuple[str, ...]:
    return (question.text, *question.choices)


def drawn_order(count: int, seed: int) -> list[int]:
    """Return a permutation sorted by a hash of each index, so that it is the same in every version of every library."""
    return sorted(range(count), key=lambda place: hashlib.sha256(f"{seed} {place}".encode()).digest())


def _shots_rule(recipe: Recipe) -> str:
    if not recipe.shots or recipe.shots_file is None:
        return "none"
    drawn = "the first" if recipe.shots_seed is None else f"drawn with seed {recipe.shots_seed}"
    return f"{recipe.shots}, {drawn} of {recipe.shots_file.name}, the same before each question"


def encode_pair(tokenizer: Tokenizer, context: str, target: str) -> tuple[list[int], list[int]]:
    """Return (context, target) tokens: both encoded together, and cut after as many tokens as the context has alone.

    Blanks at the end of the context belong to the target.
    """
    before = context.rstrip()
    ids = tokenizer.encode(before) if before else []
    return ids, tokenizer.encode(context + target)[len(ids) :]


def likeliest(item: NDArray[np.int64], nll: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each item the index of its request with the lowest nll, of equal ones the first.

    Requests of an item must be adjacent, and items in order.
    """
    starts = np.flatnonzero(np.r_[True, item[1:] != item[:-1]])
    return np.array([part.argmin() for part in np.split(nll, starts[1:])], np.float64)


def _json(line: str, source: Path, number: int) -> object:
    try:
        return parse_json(line, source)
    except DataError as error:
        raise DataError(f'{source} line {number} is not JSON. Give one {{"key": value, ...}} a line.') from error


def _recipe(name: str, below: tuple[Path, ...] = ()) -> Recipe:
    """Return a recipe by its id or its file; `below` are the files whose `like` led here, to detect a cycle."""
    files = _files()
    if not name.endswith(SUFFIXES) and name not in files:
        raise UsageError(f"like: {name} is no task of multiple choice. {spelling_hint(name, files)}")
    path = files.get(name, Path(name))
    if path in below:
        raise SettingsError([f"{path} begins with itself, through its `like:`. Name another recipe."])
    return read_recipe(path, lambda other: _recipe(other, (*below, path)))


@cache
def _files() -> dict[str, Path]:
    return {f"choice/{path.stem.replace('_', '-')}": path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def named(name: str) -> Choice | None:
    return Choice(_recipe(name)) if name.endswith(SUFFIXES) else None


TASKS = tuple(Choice(_recipe(name)) for name in _files())
