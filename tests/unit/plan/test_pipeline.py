"""The closed forms give what a replay of the schedules' tables gives."""

from __future__ import annotations

import numpy as np
import pytest

from lmtrain.plan.case import Schedule, columns
from lmtrain.plan.pipeline import makespan
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.simulate import simulate
from lmtrain.schedules.table import Action, Kind
from tests.unit.plan.cases import gpt3


def replayed(word: str, pp: int, vp: int, num: int, *, f: float, i: float, w: float, head: float = 0.0) -> float:
    """`head`: seconds of a microbatch that the last stage takes longer, a third of it forward."""

    def cost(action: Action) -> float:
        seconds = {Kind.FORWARD: f, Kind.INPUT: i, Kind.WEIGHT: w, Kind.BACKWARD: i + w}[action.kind] / vp
        more = {Kind.FORWARD: 1 / 3, Kind.BACKWARD: 2 / 3, Kind.INPUT: 1 / 3, Kind.WEIGHT: 1 / 3}[action.kind]
        return seconds + (head * more if action.stage == pp * vp - 1 else 0.0)

    return simulate(schedule_named(word).table(pp, vp, num), cost=cost).makespan


def closed(schedule: Schedule, pp: int, vp: int, num: int, *, f: float, i: float, w: float, head: float = 0.0) -> float:
    case = columns([gpt3(pp=pp, vp=vp, num_microbatches=num, schedule=schedule)])
    one = np.ones(1)
    stage = f + i + w
    return float(makespan(case, f * one, (i + w) * one, w * one, (stage + head) * one, stage * one)[0])


@pytest.mark.parametrize(("pp", "num"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 24)])
@pytest.mark.parametrize("head", [0.0, 0.9])
def test_one_f_one_b(pp: int, num: int, head: float) -> None:
    costs = {"f": 1.0, "i": 1.1, "w": 0.9, "head": head}
    assert closed(Schedule.ONE_F_ONE_B, pp, 1, num, **costs) == pytest.approx(replayed("1f1b", pp, 1, num, **costs))


@pytest.mark.parametrize(("pp", "vp", "num"), [(2, 2, 4), (4, 2, 16), (4, 4, 16), (8, 3, 24)])
def test_interleaved(pp: int, vp: int, num: int) -> None:
    costs = {"f": 1.0, "i": 1.1, "w": 0.9}
    true = replayed("interleaved", pp, vp, num, **costs)
    assert closed(Schedule.ONE_F_ONE_B, pp, vp, num, **costs) == pytest.approx(true)


@pytest.mark.parametrize(("pp", "num"), [(2, 8), (4, 16), (8, 24)])
def test_zero_bubble_with_the_memory_of_1f1b(pp: int, num: int) -> None:
    costs = {"f": 1.0, "i": 1.0, "w": 1.0}
    assert closed(Schedule.ZB_1, pp, 1, num, **costs) == pytest.approx(replayed("zb_h1", pp, 1, num, **costs))


@pytest.mark.parametrize(("pp", "num"), [(2, 8), (4, 16)])
def test_zero_bubble_v_has_no_bubble(pp: int, num: int) -> None:
    """But for the way of the first microbatch down and of the last gradient up, which a rank does not wait for."""
    costs = {"f": 1.0, "i": 1.0, "w": 1.0}
    said, true = closed(Schedule.ZB_V, pp, 2, num, **costs), replayed("zb_v", pp, 2, num, **costs)
    assert said <= true <= said + pp * 0.5 + 1e-9
