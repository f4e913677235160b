"""Settings check their values, find their kinds, and hash equal for equal values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from lmtrain.config.settings_base import Choice, Problem, Settings, kinds, problem_if, show
from lmtrain.errors import SettingsError
from lmtrain.models.model_settings import ModelSettings


@dataclass(frozen=True, kw_only=True)
class Oven(Settings):
    heat: int = 180
    trays: tuple[int, ...] = (1, 2)

    def problems(self) -> Iterator[Problem]:
        yield from problem_if(self.heat > 250, "heat", self.heat, "is above 250", "Use heat=250.")
        yield from problem_if(not self.trays, "trays", self.trays, "is empty", "Use trays=[1].")


@dataclass(frozen=True, kw_only=True)
class Kitchen(Settings):
    oven: Oven = dataclasses.field(default_factory=Oven)
    name: str = "blue"


def test_all_problems_are_raised_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Oven(heat=300, trays=())
    assert caught.value.problems == ("heat=300 is above 250. Use heat=250.", "trays=[] is empty. Use trays=[1].")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Oven().heat = 200  # type: ignore[misc]


def test_to_dict_is_plain_data() -> None:
    assert Kitchen().to_dict() == {"oven": {"heat": 180, "trays": [1, 2]}, "name": "blue"}
    assert json.loads(json.dumps(Kitchen().to_dict())) == Kitchen().to_dict()


def test_the_digest_names_the_values() -> None:
    assert Kitchen().digest() == Kitchen(oven=Oven(heat=180)).digest()
    assert Kitchen().digest() != Kitchen(oven=Oven(heat=181)).digest()


def test_kinds_are_found_in_the_rooms_settings_files() -> None:
    found = kinds(ModelSettings)
    assert "gpt" in found
    assert all(cls.kind == word and issubclass(cls, ModelSettings) for word, cls in found.items())
    assert issubclass(ModelSettings, Choice)


def test_two_classes_of_one_kind_are_refused() -> None:
    class Cup(Choice):
        file_ending: ClassVar[str] = "test_base"
        package: ClassVar[str] = "tests.unit.config"

    for _ in range(2):
        type("Mug", (Cup,), {"kind": "mug", "__module__": __name__})
    with pytest.raises(SettingsError, match=rf"^Two classes have kind=mug, in {__name__} and {__name__}\."):
        kinds(Cup)


@pytest.mark.parametrize(("value", "text"), [(None, "null"), (True, "true"), (3, "3"), ("a", "a")])
def test_values_are_shown_as_one_types_them(value: object, text: str) -> None:
    assert show(value) == text


def test_a_problem_carries_its_whole_key() -> None:
    assert Problem("optim.lr", -1, "is negative", "Use 0.1.").text() == "optim.lr=-1 is negative. Use 0.1."
