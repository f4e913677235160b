"""The tree drawn in the docstring is the tree of classes, and messages carry every problem."""

from __future__ import annotations

import re

import pytest

from lmtrain import errors
from lmtrain.errors import LmtrainError, SettingsError, spelling_hint


def _classes(base: type[LmtrainError]) -> list[type[LmtrainError]]:
    return [
        base,
        *(deeper for sub in base.__subclasses__() if sub.__module__ == errors.__name__ for deeper in _classes(sub)),
    ]


def test_the_docstring_draws_every_class_and_its_exit_code() -> None:
    drawn = dict(re.findall(r"(?:-- |^    )([A-Z]\w+) +(\d+) ", errors.__doc__ or "", re.MULTILINE))
    assert drawn == {cls.__name__: str(cls.exit_code) for cls in _classes(LmtrainError)}


def test_exit_codes_fit_into_a_byte_and_never_mean_success_or_a_signal() -> None:
    assert all(0 < cls.exit_code < 126 for cls in _classes(LmtrainError))


def test_one_problem_is_said_plainly_and_more_are_numbered() -> None:
    assert str(SettingsError(["a=1 is wrong."])) == "a=1 is wrong."
    error = SettingsError(["a=1 is wrong.", "b=2 is wrong."])
    assert error.problems == ("a=1 is wrong.", "b=2 is wrong.")
    assert str(error) == "2 settings are wrong:\n  1. a=1 is wrong.\n  2. b=2 is wrong."


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("cosin", ["cosine", "linear"], "Did you mean cosine?"),
        ("zzz", ["b", "a"], "Known: a, b."),
        ("zzz", [], "There is nothing to choose from."),
    ],
)
def test_nearest_names(name: str, known: list[str], said: str) -> None:
    assert spelling_hint(name, known) == said
