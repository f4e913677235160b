"""The closed form of a pipeline's seconds agrees with a replay of the schedule table."""

from __future__ import annotations

import numpy as np
import pytest

from lmtrain.plan.cost_model.step_time_and_energy import makespan
from lmtrain.plan.cost_model.training_workload import Schedule, stack_cases
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.schedule_simulator import simulate
from lmtrain.schedules.table import Action, Kind
from tests.unit.plan.cases import gpt3


def replayed(word: str, pp: int, vp: int, num: int, *, f: float, i: float, w: float, head: float = 0.0) -> float:
    """`head`: seconds of a microbatch that the last stage takes longer, a third of it forward."""

    def cost(action: Action) -> float:
        seconds = {Kind.FORWARD: f, Kind.INPUT: i, Kind.WEIGHT: w, Kind.BACKWARD: i + w}[action.kind] / vp
        more = {Kind.FORWARD: 1 / 3, Kind.BACKWARD: 2 / 3, Kind.INPUT: 1 / 3, Kind.WEIGHT: 1 / 3}[action.kind]
        return seconds + (head * more if action.stage == pp * vp - 1 else 0.0)

    return simulate(schedule_named(word).table(pp, vp, num), cost_of=cost).makespan


def closed(schedule: Schedule, pp: int, vp: int, num: int, *, f: float, i: float, w: float, head: float = 0.0) -> float:
    case = stack_cases([gpt3(pp=pp, vp=vp, num_microbatches=num, schedule=schedule)])
    one = np.ones(1)
    stage = f + i + w
    weight_last = (w + head / 3) * one
    return float(makespan(case, f * one, (i + w) * one, w * one, (stage + head) * one, stage * one, weight_last)[0])


@pytest.mark.parametrize(("pp", "num"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 24)])
@pytest.mark.parametrize("head", [0.0, 0.9])
def test_one_f_one_b(pp: int, num: int, head: float) -> None:
    costs = {"f": 1.0, "i": 1.1, "w": 0.9, "head": head}
    assert closed(Schedule.ONE_F_ONE_B, pp, 1, num, **costs) == pytest.approx(replayed("1f1b", pp, 1, num, **costs))


@pytest.mark.parametrize("num", [1, 2, 3, 5, 16, 24])
@pytest.mark.parametrize(("pp", "vp"), [(2, 2), (4, 2), (4, 4), (8, 3)])
def test_interleaved(pp: int, vp: int, num: int) -> None:
    costs = {"f": 1.0, "i": 1.1, "w": 0.9}
    true = replayed("interleaved", pp, vp, num, **costs)
    assert closed(Schedule.ONE_F_ONE_B, pp, vp, num, **costs) == pytest.approx(true)


@pytest.mark.parametrize("num", [1, 2, 3, 6, 12, 24])
@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize(("word", "schedule", "vp"), [("zb_h1", Schedule.ZB_1, 1), ("zb_v", Schedule.ZB_V, 2)])
def test_split_backwards(word: str, schedule: Schedule, vp: int, pp: int, num: int) -> None:
    """Where all parts take as long it is the replay's time, few microbatches or many; elsewhere it is near."""
    even = {"f": 1.0, "i": 1.0, "w": 1.0}
    assert closed(schedule, pp, vp, num, **even) == pytest.approx(replayed(word, pp, vp, num, **even))
    for uneven in ({"f": 1.0, "i": 1.3, "w": 0.8}, {"f": 1.2, "i": 1.0, "w": 1.1}):
        true = replayed(word, pp, vp, num, **uneven)
        assert closed(schedule, pp, vp, num, **uneven) == pytest.approx(true, rel=0.03)


@pytest.mark.parametrize("num", [4, 16, 64])
@pytest.mark.parametrize("head", [0.3, 1.0, 3.0])
def test_a_heavy_head_hides_what_the_others_put_off(head: float, num: int) -> None:
    costs = {"f": 1.0, "i": 1.3, "w": 0.8, "head": head}
    true = replayed("zb_h1", 4, 1, num, **costs)
    assert closed(Schedule.ZB_1, 4, 1, num, **costs) == pytest.approx(true, rel=0.02)
