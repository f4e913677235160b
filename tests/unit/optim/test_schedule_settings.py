"""Learning-rate schedules: their values at key points, and what holds for all of them at every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.settings_base import kinds
from lmtrain.errors import SettingsError
from lmtrain.optim.schedule_settings import (
    ConstantSettings,
    CosineSettings,
    InverseSqrtSettings,
    LinearSettings,
    ScheduleSettings,
    WSDSettings,
)

KINDS = kinds(ScheduleSettings)


def made(data: dict[str, Any]) -> ScheduleSettings:
    return build_settings(ScheduleSettings, data, "schedule")  # type: ignore[type-abstract]


def test_cosine() -> None:
    schedule = CosineSettings(warmup_steps=10, min_ratio=0.1)
    assert schedule.factor(0, 110) == pytest.approx(0.1)
    assert schedule.factor(4, 110) == pytest.approx(0.5)
    assert schedule.factor(9, 110) == schedule.factor(10, 110) == 1.0
    assert schedule.factor(60, 110) == pytest.approx(0.55)
    assert schedule.factor(35, 110) == pytest.approx(0.1 + 0.9 * (0.5 + math.sqrt(0.5) / 2))
    assert schedule.factor(110, 110) == schedule.factor(500, 110) == pytest.approx(0.1)


def test_linear() -> None:
    schedule = LinearSettings(warmup_steps=10)
    assert schedule.factor(10, 110) == 1.0
    assert schedule.factor(60, 110) == pytest.approx(0.5)
    assert schedule.factor(109, 110) == pytest.approx(0.01)  # the last update still moves
    assert schedule.factor(110, 110) == 0.0


def test_inverse_sqrt() -> None:
    schedule = InverseSqrtSettings(warmup_steps=100)
    assert schedule.factor(99, 10**6) == schedule.factor(100, 10**6) == 1.0
    assert schedule.factor(400, 10**6) == pytest.approx(0.5)
    assert schedule.factor(400, 401) == schedule.factor(400, 10**6)
    assert InverseSqrtSettings(warmup_steps=100, min_ratio=0.7).factor(400, 10**6) == 0.7
    assert InverseSqrtSettings().factor(4, 10) == pytest.approx(0.5)


@pytest.mark.parametrize(("decay", "half"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)])
def test_wsd(decay: Any, half: float) -> None:
    schedule = WSDSettings(warmup_steps=10, decay_fraction=0.2, decay=decay)
    assert schedule.factor(0, 100) == pytest.approx(0.1)
    assert {schedule.factor(step, 100) for step in range(9, 81)} == {1.0}
    assert schedule.factor(90, 100) == pytest.approx(half)
    assert 0 < schedule.factor(99, 100) < schedule.factor(98, 100)
    assert schedule.factor(100, 100) == 0.0
    assert WSDSettings(decay_fraction=0.2, min_ratio=0.5).factor(90, 100) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("decay", "factor", "last"),
    [
        ("linear", lambda x: 1 - x, 1 / 20), ("sqrt", lambda x: 1 - x**0.5, 0.5 / 20),
        ("cosine", lambda x: math.cos(math.pi * x / 2) ** 2, 2.5 / 20**2),
    ],
)  # fmt: skip
def test_each_decay_by_its_formula(decay: Any, factor: Callable[[float], float], last: float) -> None:
    """Decay step i of n lies at x = i/n, so that the first changes nothing and the last is just before the end."""
    schedule = WSDSettings(warmup_steps=3, decay_fraction=0.2, decay=decay, min_ratio=0.3)
    found = [schedule.factor(step, 100) for step in range(80, 101)]
    assert found == pytest.approx([0.3 + 0.7 * factor(i / 20) for i in range(21)], abs=1e-12)
    assert found[0] == 1.0
    assert (found[19] - 0.3) / 0.7 == pytest.approx(last, rel=0.02)


def test_wsd_decays_over_the_nearest_number_of_steps() -> None:
    """0.29 x 100 is a little less than 29 for a machine."""
    schedule = WSDSettings(decay_fraction=0.29)
    assert schedule.factor(71, 100) == 1.0
    assert schedule.factor(72, 100) == pytest.approx(28 / 29)


def test_constant() -> None:
    assert {ConstantSettings().factor(step, 10) for step in range(12)} == {1.0}
    assert ConstantSettings(warmup_steps=4).factor(1, 10) == 0.5


@given(
    data=st.data(),
    kind=st.sampled_from(sorted(KINDS)),
    total=st.integers(2, 300),
    min_ratio=st.floats(0, 1),
)
def test_what_holds_for_all(data: st.DataObject, kind: str, total: int, min_ratio: float) -> None:
    """In [0, 1], never 0 during the run, up in the warm-up, down after it, and without jumps."""
    warmup = data.draw(st.integers(0, total // 2))
    values: dict[str, Any] = {"kind": kind, "warmup_steps": warmup}
    if hasattr(KINDS[kind], "min_ratio"):
        values["min_ratio"] = min_ratio
    if kind == "wsd":
        values["decay"] = data.draw(st.sampled_from(["linear", "sqrt", "cosine"]))
        values["decay_fraction"] = data.draw(st.floats(0, 0.5))
    schedule = made(values)
    factors = [schedule.factor(step, total) for step in range(total)]
    assert all(0 < factor <= 1 for factor in factors)
    rising, falling = factors[: warmup + 1], factors[max(0, warmup - 1) :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if warmup:
        assert factors[warmup - 1] == 1.0
        assert factors[0] == pytest.approx(1 / warmup)


@pytest.mark.parametrize("kind", ["cosine", "inverse_sqrt", "linear", "wsd"])
def test_longer_runs_have_no_jumps(kind: str) -> None:
    schedule = made({"kind": kind, "warmup_steps": 1000})
    factors = [schedule.factor(step, 20_000) for step in range(20_001)]
    assert max(abs(b - a) for a, b in pairwise(factors)) <= 1.01e-3


def test_human_sizes() -> None:
    settings = made({"kind": "cosine", "warmup_steps": "2k"})
    assert settings.warmup_steps == 2000


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"kind": "cosine", "warmup_steps": -1}, "schedule.warmup_steps=-1"),
        ({"kind": "linear", "min_ratio": 1.5}, "schedule.min_ratio=1.5"),
        ({"kind": "wsd", "decay_fraction": 1.5}, "schedule.decay_fraction=1.5"),
        ({"kind": "wsd", "decay": "cubic"}, "schedule.decay=cubic"),
        ({"kind": "cosin"}, "Did you mean cosine?"),
        ({"kind": "constant", "min_ratio": 0.1}, "schedule.min_ratio=0.1 is not a setting"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingsError) as caught:
        made(values)
    assert word in str(caught.value)


def test_what_does_not_fit_a_run() -> None:
    assert not list(CosineSettings(warmup_steps=9).problems_in_run(10))
    (problem,) = CosineSettings(warmup_steps=10).problems_in_run(10)
    assert "warmup_steps=10 must be less than the run's 10 steps" in problem.text()
    assert not list(WSDSettings(warmup_steps=80).problems_in_run(100))
    (problem,) = WSDSettings(warmup_steps=81).problems_in_run(100)
    assert "warmup_steps=81 ends after the decay begins at step 80 of 100" in problem.text()
