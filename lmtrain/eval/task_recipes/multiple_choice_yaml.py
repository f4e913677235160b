"""Recipes of multiple choice tasks: some lines of YAML, checked strictly, that turn rows into questions. Torch-free.

Called by the choice tasks. A recipe contains no code. It names keys of a row: `choices.text` is the key `text` of the
value of `choices`, and for a list the key of each element. `{goal}` in a text stands for the value of a key;
`{ctx|capitalized}` for the value changed by a function in FILTERS. An error about a row names the file's line and the
recipe's line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, get_args

from lmtrain.config.strict_yaml import YamlFile, read_yaml
from lmtrain.errors import DataError, SettingsError, shorten, spelling_hint

Normalisation = Literal["characters", "bytes", "none"]
SUFFIXES = (".yaml", ".yml")
KEYS = {
    "like": "a recipe to begin with: an id, as choice/piqa, or a file", "id": "its name in results", "version": "",
    "data": "what file it reads, for people", "each": "keys whose lists go together: a question for each entry",
    "question": "the text before an answer", "choices": "a key of a list, or a list of texts",
    "labels": "what `answer` calls the choices, if not 0, 1, 2", "answer": "the key of the right one",
    "between": "what stands between question and answer", "clean": "how texts are tidied", "shots": "how many",
    "shots_file": "rows with answers to show first", "shots_seed": "to draw them; else the first",
    "normalisation": "what an answer's log-likelihood is divided by in the second accuracy",
}  # fmt: skip
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def _clean_wikihow(text: str) -> str:
    """Return a text cleaned for HellaSwag's WikiHow half, exactly as lm-evaluation-harness does it."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


FILTERS: dict[str, Callable[[str], str]] = {"capitalized": str.capitalize, "stripped": str.strip, "lower": str.lower}
CLEANERS: dict[str, Callable[[str], str]] = {"none": lambda text: text, "wikihow": _clean_wikihow}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its choices. `text` does not include the shots; `line` is the row's line in its file."""

    text: str
    choices: list[str]
    answer: int
    line: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    id: str
    version: str = "1"
    data: str = "one JSON object a line, with the keys that the recipe names"
    each: list[str] = field(default_factory=list)
    question: str
    choices: str | list[str]
    labels: str | list[str] | None = None
    answer: str
    between: str = " "
    clean: str = "none"
    shots: int = 0
    shots_file: Path | None = None
    shots_seed: int | None = None
    normalisation: Normalisation = "characters"
    at: dict[str, str] = field(default_factory=dict)  # file and line of each key, for messages
    files: tuple[Path, ...] = ()  # that of the recipe and those that it is `like`

    def questions(self, row: Any, path: Path, line: int) -> Iterator[Question]:
        """Return the questions in `row`, a line of the data: one, or, if the recipe names lists under `each`, one for
        each entry of these lists. Raise DataError if the row does not fit the recipe; `path` and `line` say in the
        message where it is.
        """
        if not isinstance(row, dict):
            raise DataError(f'{path} line {line} is not a JSON object. Give one {{"key": value, ...}} a line.')
        rows = Row(self, row, path, line)
        return (entry.question() for entry in (rows.entries() if self.each else [rows]))


@dataclass(frozen=True)
class Row:
    """A row of a file, read by the recipe's keys; a key that the row lacks raises DataError."""

    recipe: Recipe
    values: dict[str, Any]
    path: Path
    line: int

    def entries(self) -> list[Row]:
        lists = [self._list("each", key) for key in self.recipe.each]
        if len({len(values) for values in lists}) > 1:
            counts = ", ".join(f"{key} {len(values)}" for key, values in zip(self.recipe.each, lists, strict=True))
            raise DataError(
                f"{self.place} has lists of different lengths ({counts}), but {self._setting('each')} reads them "
                "together. Give all lists as many entries."
            )
        return [
            replace(self, values=self.values | dict(zip(self.recipe.each, values_of_entry, strict=True)))
            for values_of_entry in zip(*lists, strict=True)
        ]

    def question(self) -> Question:
        recipe, clean = self.recipe, CLEANERS[self.recipe.clean]
        text = clean(self._filled("question", recipe.question))
        choices = self._texts("choices", recipe.choices)
        if len(choices) < 2 or not all(choices):
            raise DataError(
                f"{self.place} has {'an empty choice' if len(choices) > 1 else 'fewer than two choices'}. Name two or "
                f"more texts to choose from in {self._setting('choices')}."
            )
        return Question(
            text=text,
            choices=[clean(choice) for choice in choices],
            answer=self._answer(len(choices)),
            line=self.line,
        )

    def _answer(self, count: int) -> int:
        value = self._value("answer", self.recipe.answer)
        label = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
        named_labels = self.recipe.labels
        labels = [*map(str, range(count))] if named_labels is None else self._texts("labels", named_labels)[:count]
        if label not in labels:
            raise DataError(
                f"{self.place} has the answer {shorten(label or value, 60)!r}, but its {count} choices are called "
                f"{', '.join(labels)}. Change {self._setting('answer')}, or give `labels`."
            )
        return labels.index(label)

    def _texts(self, key: str, source: str | list[str]) -> list[str]:
        if isinstance(source, list):
            return [self._filled(key, text) for text in source]
        return [self._text(key, source, value) for value in self._list(key, source)]

    def _list(self, key: str, path: str) -> list[Any]:
        value = self._value(key, path)
        if not isinstance(value, list):
            raise DataError(
                f"{self.place} has no list under {path}, and {self._setting(key)} needs it. "
                "Name a key that holds a list."
            )
        return value

    def _filled(self, key: str, template: str) -> str:
        def value(match: re.Match[str]) -> str:
            if match[1] is None:
                return match[0][0]
            path, _, change = match[1].partition("|")
            text = self._text(key, path, self._value(key, path))
            return FILTERS[change](text) if change else text

        return _FIELD.sub(value, template)

    def _text(self, key: str, path: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise DataError(
                f"{self.place} has no text under {path}, and {self._setting(key)} needs it. "
                "Name a key that holds a text."
            )
        return str(value)

    def _value(self, key: str, path: str) -> Any:
        value: Any = self.values
        parts = path.split(".")
        try:
            for place, part in enumerate(parts):
                if isinstance(value, list):
                    return [reduce(getitem, parts[place:], element) for element in value]
                value = value[part]
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{self.place} has no {path}, and {self._setting(key)} needs it. {spelling_hint(path, self.values)}"
            ) from error
        return value

    @property
    def place(self) -> str:
        """The file and line of the row, for messages."""
        return f"{self.path} line {self.line}"

    def _setting(self, key: str) -> str:
        """Return where the recipe has `key`, for messages."""
        return self.recipe.at.get(key, self.recipe.id)


def read_recipe(path: Path, find: Callable[[str], Recipe]) -> Recipe:
    """Read the multiple choice recipe in the YAML file `path` and check it. If its key `like` names another recipe, by
    id or file, `find` is called to get that. Raise SettingsError with all problems found.
    """
    file = read_yaml(path)
    problems = [f"{file.location(key)} has the key {key}, which no recipe has. {spelling_hint(key, KEYS)}"
                for key in file.data if key not in KEYS]  # fmt: skip
    own = {key: value for key, value in file.data.items() if key in KEYS}
    at = {key: f"{file.location(key)} ({key})" for key in own}
    base: dict[str, Any] = {"id": f"choice/{path.stem}"}
    base_name = own.pop("like", None)
    if isinstance(base_name, str):
        base = vars(find(str(path.parent / base_name) if base_name.endswith(SUFFIXES) else base_name)) | base
        at = base.pop("at") | at
    elif base_name is not None:
        problems.append(
            f"{file.location('like')} has like={shorten(base_name)}, which is not a text. Name a task: choice/piqa."
        )
    values = base | own
    problems += [
        f"{path} has no `{key}:` line, {KEYS[key]}. Add one, or begin with `like: choice/piqa`."
        for key in ("question", "choices", "answer") if key not in values
    ]  # fmt: skip
    problems += _value_problems(file, own)
    if problems:
        raise SettingsError(problems)
    if "shots_file" in own:
        values["shots_file"] = path.parent / own["shots_file"]
    if values.get("shots") and not values.get("shots_file"):
        raise SettingsError([
            f"{file.location('shots')} has shots={values['shots']}, but the recipe has no `shots_file:`. "
            "Name a file of rows like those of the data, with other questions."
        ])
    return Recipe(**values | {"at": at, "files": (*base.get("files", ()), path)})


def _value_problems(file: YamlFile, own: dict[str, Any]) -> Iterator[str]:
    def problem(key: str, rule: str, way_out: str) -> str:
        return f"{file.location(key)} has {key}={shorten(str(own[key]), 80)}, which {rule}. {way_out}"

    for key, value in own.items():
        texts = isinstance(value, list) and value and all(isinstance(text, str) for text in value)
        if key == "shots":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1000:
                yield problem(key, "is not a whole number from 0 to 1000", "Write shots: 5.")
        elif key == "shots_seed":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                yield problem(key, "is not a whole number from 0 on", "Write shots_seed: 1, or leave it out.")
        elif key == "each":
            if not texts:
                yield problem(key, "is not a list of keys", "Write each: [questions, answers].")
        elif not isinstance(value, str) and not (key in ("choices", "labels") and texts):
            yield problem(key, "is not a text" + (" or a list of texts" if key in ("choices", "labels") else ""),
                        "Put it in quotes if it is one.")  # fmt: skip
        else:
            yield from _field_problems(key, value, problem)


def _field_problems(key: str, value: str | list[str], problem: Callable[[str, str, str], str]) -> Iterator[str]:
    allowed = {"clean": tuple(CLEANERS), "normalisation": get_args(Normalisation)}.get(key)
    if allowed and value not in allowed:
        yield problem(key, "is not known", spelling_hint(str(value), allowed))
    if key in ("answer", "choices", "labels") and isinstance(value, str) and "{" in value:
        yield problem(key, "is a text, but must be the name of a key", f"Write {key}: label, without braces.")
    if key == "question" or (key in ("choices", "labels") and isinstance(value, list)):
        for text in value if isinstance(value, list) else [value]:
            for match in _FIELD.finditer(text):
                name, _, change = (match[1] or "").partition("|")
                if match[0] in ("{", "}") or (match[1] is not None and not name):
                    yield problem(key, f"has {match[0]} without the name of a key", "Write {goal}, or {{ for a brace.")
                elif change and change not in FILTERS:
                    yield problem(key, f"has the unknown filter {change}", spelling_hint(change, FILTERS))
