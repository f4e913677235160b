"""Only the last end, and of many microbatches only some: the same as when every action is replayed."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from lmtrain.schedules.schedule_simulator import makespan, simulate
from lmtrain.schedules.table import Action, Kind

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("interleaved", 2), ("interleaved", 5)]


def uneven(num_stages: int, seed: int) -> dict[tuple[Kind, int], float]:
    """Stages of one block or two, and a head."""
    dice = random.Random(seed)
    found: dict[tuple[Kind, int], float] = {}
    for stage in range(num_stages):
        blocks, head = dice.choice((1, 2)), 0.4 if stage == num_stages - 1 else 0.0
        found |= {(kind, stage): blocks + head for kind in (Kind.FORWARD, Kind.INPUT)}
        found[Kind.WEIGHT, stage] = 0.7 * blocks + head
        found[Kind.BACKWARD, stage] = found[Kind.INPUT, stage] + found[Kind.WEIGHT, stage]
    return found


def replayed(word: str, pp: int, vp: int, num: int, costs: dict[tuple[Kind, int], float]) -> float:
    return simulate(schedule_named(word).table(pp, vp, num), cost_of=lambda a: costs[a.kind, a.stage]).makespan


@pytest.mark.parametrize("num", [1, 3, 8, 19, 48])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(("word", "vp"), SCHEDULES)
def test_few_or_many_microbatches(word: str, vp: int, pp: int, num: int) -> None:
    for seed in range(3):
        costs = uneven(pp * vp, seed)
        # because: groups of interleaved stages are not all as large where the ranks do not divide the microbatches
        near = 0.025 if word == "interleaved" and num % pp and num > 5 * pp else 1e-9
        found = makespan(schedule_named(word), pp, vp, num, costs)
        assert found == pytest.approx(replayed(word, pp, vp, num, costs), rel=near)


def test_ranks_that_are_about_as_busy() -> None:
    """The first messages are late, and it takes many microbatches until the busiest rank is all that counts."""
    costs = {key: 1.0 + 0.001 * (key[1] == 1) for key in uneven(4, 0)}
    costs |= {(Kind.BACKWARD, stage): 2 * costs[Kind.INPUT, stage] for stage in range(4)}
    found = makespan(schedule_named("1f1b"), 4, 1, 400, costs)
    assert found == pytest.approx(replayed("1f1b", 4, 1, 400, costs), rel=1e-9)


class Halting(PipelineSchedule):
    kind: ClassVar[str] = "halting"

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> list[Action]:
        return [Action(Kind.BACKWARD, rank, 0), Action(Kind.FORWARD, rank, 0)]


def test_a_schedule_that_comes_to_a_halt_is_told() -> None:
    with pytest.raises(ValueError, match="deadlocks"):
        makespan(Halting(), 2, 1, 1, uneven(2, 0))
