"""Plain data becomes typed settings, or one error that lists everything wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.config.build_typed_settings import build_settings, quantity
from lmtrain.config.settings_base import Choice, Problem, Settings, problem_if
from lmtrain.errors import LayoutError, SettingsError


@dataclass(frozen=True, kw_only=True)
class Drink(Choice):
    file_ending: ClassVar[str] = "test_build"
    package: ClassVar[str] = "tests.unit.config"
    sugar: int = 0


@dataclass(frozen=True, kw_only=True)
class Tea(Drink):
    kind: ClassVar[str] = "tea"
    leaves: float

    def problems(self) -> Iterator[Problem]:
        yield from problem_if(self.leaves <= 0, "leaves", self.leaves, "must be above 0", "Use 2.")


@dataclass(frozen=True, kw_only=True)
class Coffee(Drink):
    kind: ClassVar[str] = "coffee"


@dataclass(frozen=True, kw_only=True)
class Order(Settings):
    drink: Drink
    cups: int = quantity("count", default=1)
    volume: int | None = quantity("bytes", default=None)
    wait: float = quantity("seconds", default=0.0)
    name: str = "anon"
    hot: bool = True
    size: Literal["small", "large"] = "small"
    times: tuple[float, ...] = ()
    prices: dict[str, float] = field(default_factory=dict)
    spare: Tea | None = None


def _problems(data: Any) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        build_settings(Order, data)
    return caught.value.problems


def test_a_whole_order() -> None:
    built = build_settings(
        Order,
        {
            "drink": {"kind": "tea", "leaves": 2, "sugar": 1}, "cups": "1k", "volume": "2KiB", "wait": "2min",
            "name": 7, "hot": False, "size": "large", "times": [1, 2.5], "spare": {"leaves": 1.0}, "prices": {"tea": 2},
        },
    )  # fmt: skip
    assert built == Order(
        drink=Tea(leaves=2.0, sugar=1), cups=1000, volume=2048, wait=120.0, name="7", hot=False, size="large",
        times=(1.0, 2.5), spare=Tea(leaves=1.0), prices={"tea": 2.0},
    )  # fmt: skip
    assert isinstance(built.times[0], float)


def test_settings_build_back_from_their_own_data() -> None:
    order = Order(drink=Coffee(sugar=3), cups=4, volume=None, times=(0.5,), spare=Tea(leaves=0.1))
    assert build_settings(Order, order.to_dict()) == order


@given(cups=st.integers(-(2**53), 2**53), wait=st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive(cups: int, wait: float) -> None:
    built = build_settings(Order, {"drink": {"kind": "coffee"}, "cups": float(cups), "wait": wait})
    assert (built.cups, built.wait) == (cups, wait)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"drink": {"kind": "te", "leaves": 1}},
            "drink.kind=te is not a kind of drink. Did you mean tea? If it is a plugin's, add --plugin PACKAGE.",
        ),
        ({"drink": {}}, "drink.kind=null is not a kind of drink. Known: coffee, tea."),
        ({"drink": 3}, "drink=3 is not a group of settings. Give its keys one by one: drink.KEY=VALUE."),
        ({"drink": {"kind": "tea"}}, "drink.leaves is not set. Add drink.leaves=VALUE."),
        ({"drink": {"kind": "tea", "leaves": 0}}, "drink.leaves=0.0 must be above 0. Use 2."),
        ({"drink": {"kind": "tea", "leaves": 1, "suger": 1}},
         "drink.suger=1 is not a setting. Did you mean drink.sugar=1?"),
        ({"cups": 1.5}, "cups=1.5 is not a whole number. Give a whole number, such as 1."),
        ({"cups": True}, "cups=true is not a whole number. Give a whole number, such as 1."),
        ({"cups": "many"}, "cups=many is not a size such as 2000, 10M or 300B. Give a whole number, such as 1000."),
        ({"name": None}, "name=null is not a text. Give a text, such as anon."),
        ({"hot": "yes"}, "hot=yes is not true or false. Write hot=true."),
        ({"size": "larg"}, "size=larg is not an allowed value. Did you mean large?"),
        ({"prices": [1]}, "prices=[1] is not a mapping of names to numbers. Give a mapping of names to numbers."),
        ({"prices": {"tea": "much"}}, "prices.tea=much is not a number. Give a number, such as 1.0."),
        ({"prices": {"tea": "1e-3x"}}, "prices.tea=1e-3x is not a number. Write prices.tea=1e-3."),
        ({"prices": {"tea": "2k"}}, "prices.tea=2k is not a number. Write prices.tea=2000."),
        ({"prices": {"tea": "3/4"}}, "prices.tea=3/4 is not a number. Write prices.tea=0.75."),
        ({"times": 3}, "times=3 is not a list of numbers. Write \"times=[3]\"."),
        ({"times": [1, "x"]}, "times=[1,x] is not a list of numbers. Give a list of numbers."),
        ({"cups": -1e30}, "cups=-1e+30 must be at least -1e18. Give a number, such as 1."),
        ({"cups": 1e30}, "cups=1e+30 must be at most 1e18. Give a number, such as 1."),
        ({"wait": float("nan")}, "wait=nan is not a finite number. Give a number, such as 0.0."),
        ({"name": "a\0b"}, "name holds a zero byte, which a text cannot contain. Remove it."),
        ({"name": "\udcff"}, "name holds half a character (U+DCFF), which UTF-8 cannot encode. Give another value."),
        ({"cups": 10**400}, f"cups={10**400} must be at most 1e18. Give a number, such as 1."),
        ({"wait": 10**400}, f"wait={10**400} is not a finite number. Give a number, such as 0.0."),
        ({"cups": "9" * 400}, f"cups={'9' * 400} is too large for a number. Give a whole number, such as 1000."),
        ({"spare": {"kind": "coffee"}}, "spare.kind=coffee is not a kind of spare. Known: tea."),
    ],
)
def test_one_wrong_value_is_one_sentence_and_a_way_out(change: dict[str, Any], said: str) -> None:
    assert _problems({"drink": {"kind": "tea", "leaves": 1}} | change) == (said,)


def test_problems_of_the_layout_alone_are_another_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Trays(Settings):
        wide: int = 1

        def problems(self) -> Iterator[Problem]:
            yield Problem("wide", self.wide, "does not fit the oven", "Use 1.", of_layout=self.wide > 1)

    with pytest.raises(LayoutError, match="wide=2 does not fit the oven"):
        build_settings(Trays, {"wide": 2})
    with pytest.raises(SettingsError, match="2 settings are wrong"):
        build_settings(Trays, {"wide": 1, "deep": 1} | {"wide": "x"})


def test_every_problem_is_collected() -> None:
    assert len(_problems({"drink": {"kind": "tea", "leaves": -1}, "cups": "x", "hot": 1, "nmae": 1})) == 4


def test_a_prefix_is_put_before_every_key() -> None:
    with pytest.raises(SettingsError, match=r"^run\.cups=x is not a size"):
        build_settings(Order, {"drink": {"kind": "coffee"}, "cups": "x"}, prefix="run")
