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

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, SettingsError, UsageError, spelling_hint
from lmtrain.eval.read_texts import count_odd_characters, read_text_file
from lmtrain.eval.task import (
    Answers,
    Columns,
    Facts,
    Prepared,
    Sums,
    Task,
    TaskOptions,
    encode_pair,
    eod_id,
    item_columns,
    ratio,
)
from lmtrain.eval.task_recipes.multiple_choice_yaml import SUFFIXES, Question, Recipe, read_recipe
from lmtrain.eval.windows import Request
from lmtrain.runtime.files.atomic_files import parse_json

BETWEEN_SHOTS = "\n\n"
SECOND_ACCURACY = {"characters": "per_character_accuracy", "bytes": "per_byte_accuracy"}


@dataclass(frozen=True)
class ChoiceRequest(Request):
    """A choice of a question, to be scored as the text after the question. The request's item is the question."""

    length: float = 1.0  # of the choice, in the unit by which the second accuracy divides


class Choice(Task):
    """A task of multiple choice, as a recipe describes it."""

    headline = "accuracy"

    def __init__(self, recipe: Recipe) -> None:
        self.choice_recipe, self.id, self.version, self.data = recipe, recipe.id, recipe.version, recipe.data
        # because: the version of lmtrain stands for the files of its own tasks
        of_user = [file for file in recipe.files if file not in _builtin_files().values()]
        self.files = of_user if recipe.shots_file is None else [*of_user, recipe.shots_file]
        self.recipe = {
            "question": repr(recipe.question),
            "answer": f"{recipe.between!r} and a choice, tokenized together with the question",
            "right": "the likeliest choice, of several that are alike the first; "
            + (f"in {SECOND_ACCURACY[recipe.normalisation]}, after dividing its log-likelihood by its "
               f"{recipe.normalisation}" if recipe.normalisation in SECOND_ACCURACY
               else "nothing is divided by a length"),
            "shots": _shots_rule(recipe),
            "long rows": "cut on the left to seq_len + 1 tokens",
        }  # fmt: skip

    def prepare(self, source: Path, options: TaskOptions) -> Prepared:
        recipe = self.choice_recipe
        options.refuse_any_stride(self.id)
        content, sha256 = read_text_file(source)
        questions = list(self._questions(content, source))
        shots = Shots.read(self, questions)
        rows: list[Request] = []
        num_cut = 0
        for item, question in enumerate(questions):
            before = shots.text_before(question)
            for choice in question.choices:
                context, target = encode_pair(options.tokenizer, before + question.text, recipe.between + choice)
                if not 1 <= len(target) <= options.seq_len:
                    raise DataError(
                        f"{source} line {question.line}: the answer {choice[:40]!r} has {len(target)} tokens; the "
                        f"window takes 1 to {options.seq_len}. Give a tokenizer for such text, or a longer window."
                    )
                ids = (context or [eod_id(options.tokenizer)]) + target
                num_cut += len(ids) > options.seq_len + 1
                length = float(len(choice.encode() if recipe.normalisation == "bytes" else choice))
                tokens = np.array(ids[-(options.seq_len + 1) :], np.int64)
                rows.append(ChoiceRequest(tokens, len(target), item, length=length))
        num_bytes = np.array(
            [sum(len(choice.encode()) for choice in question.choices) for question in questions], np.float64
        )
        return Prepared(
            requests=rows,
            num_targets=sum(row.num_scored for row in rows),
            text_columns={
                "bytes": num_bytes,
                "answer": np.array([question.answer for question in questions], np.float64),
                "chance": np.array([1 / len(question.choices) for question in questions]),
            },
            facts=Facts(
                protocol=options.protocol_id(self.id + (f"-{recipe.shots}shot" if recipe.shots else "")),
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
                    "shots": shots.description,
                    "rows_cut_on_the_left": num_cut,
                    **count_odd_characters(content),
                },
            ),
        )

    def columns(self, prepared: Prepared, answers: Answers) -> Columns:
        columns = item_columns(prepared.text_columns, answers)
        chosen = likeliest_choice(answers.item, answers.nll)
        columns |= {"chosen": chosen, "items_greedy": (chosen == columns["answer"]).astype(np.float64)}
        if self.choice_recipe.normalisation in SECOND_ACCURACY:
            lengths = np.array([getattr(request, "length", 1.0) for request in prepared.requests])
            by_length = likeliest_choice(answers.item, answers.nll / lengths)
            columns["items_by_length"] = (by_length == columns["answer"]).astype(np.float64)
        return columns

    def measures(self, sums: Sums) -> dict[str, float]:
        measures = {"accuracy": ratio(sums["items_greedy"], sums["items"])}
        if "items_by_length" in sums:
            measures[SECOND_ACCURACY[self.choice_recipe.normalisation]] = ratio(sums["items_by_length"], sums["items"])
        return measures | {"chance_accuracy": ratio(sums["chance"], sums["items"])}

    def _questions(self, content: str, source: Path) -> Iterator[Question]:
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                yield from self.choice_recipe.questions(_parse_line(line, source, number), source, number)


@dataclass(frozen=True)
class Shots:
    """Answered questions to put before other questions."""

    rows: Sequence[Question]  # in the order in which they are used
    count: int
    between: str
    description: str

    @classmethod
    def read(cls, task: Choice, questions: Sequence[Question]) -> Shots:
        recipe = task.choice_recipe
        if not recipe.shots or recipe.shots_file is None:
            return cls((), 0, recipe.between, "none")
        content, sha256 = read_text_file(recipe.shots_file)
        rows = list(task._questions(content, recipe.shots_file))
        if recipe.shots_seed is not None:
            rows = [rows[place] for place in drawn_order(len(rows), recipe.shots_seed)]
        counts = Counter(map(_question_key, rows))
        num_other = len(rows) - max((counts[_question_key(question)] for question in questions), default=0)
        if num_other < recipe.shots:
            raise DataError(
                f"{recipe.shots_file} has {num_other} questions besides the one that is asked, but "
                f"{recipe.at.get('shots', task.id)} asks for {recipe.shots}. Give fewer shots, or add rows."
            )
        return cls(rows, recipe.shots, recipe.between, f"{_shots_rule(recipe)}, sha256 {sha256}")

    def text_before(self, question: Question) -> str:
        """Return the first `count` questions that differ from this one, each with its answer, as a text."""
        shots = islice((row for row in self.rows if _question_key(row) != _question_key(question)), self.count)
        return "".join(f"{row.text}{self.between}{row.choices[row.answer]}{BETWEEN_SHOTS}" for row in shots)


def _question_key(question: Question) -> tuple[str, ...]:
    return (question.text, *question.choices)


def drawn_order(count: int, seed: int) -> list[int]:
    """Return a permutation sorted by a hash of each index, so that it is the same in every version of every library."""
    return sorted(range(count), key=lambda place: hashlib.sha256(f"{seed} {place}".encode()).digest())


def _shots_rule(recipe: Recipe) -> str:
    if not recipe.shots or recipe.shots_file is None:
        return "none"
    order = "the first" if recipe.shots_seed is None else f"drawn with seed {recipe.shots_seed}"
    return f"{recipe.shots}, {order} of {recipe.shots_file.name}, the same before each question"


def likeliest_choice(item: NDArray[np.int64], nll: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each item the index of its request with the lowest nll, of equal ones the first.

    Requests of an item must be adjacent, and items in order.
    """
    parts = np.split(nll, np.flatnonzero(np.diff(item)) + 1)
    return np.array([part.argmin() for part in parts], np.float64)


def _parse_line(line: str, source: Path, number: int) -> object:
    try:
        return parse_json(line, source)
    except DataError as error:
        raise DataError(f'{source} line {number} is not JSON. Give one {{"key": value, ...}} a line.') from error


def _load_recipe(name: str, chain: tuple[Path, ...] = ()) -> Recipe:
    """Return the recipe with the id or the YAML file `name`. `chain` has the files whose key `like` led to this one, to
    detect a cycle.
    """
    files = _builtin_files()
    if not name.endswith(SUFFIXES) and name not in files:
        raise UsageError(f"`like: {name}` does not name a multiple choice task. {spelling_hint(name, files)}")
    path = files.get(name, Path(name))
    if path in chain:
        raise SettingsError([f"The recipe {path} refers to itself through its `like:`. Name another recipe there."])
    return read_recipe(path, lambda other: _load_recipe(other, (*chain, path)))


@cache
def _builtin_files() -> dict[str, Path]:
    return {f"choice/{path.stem.replace('_', '-')}": path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def named(name: str) -> Choice | None:
    """Return the task for the recipe file `name`, or None if the name does not end like a YAML file's."""
    return Choice(_load_recipe(name)) if name.endswith(SUFFIXES) else None


TASKS = tuple(Choice(_load_recipe(name)) for name in _builtin_files())
