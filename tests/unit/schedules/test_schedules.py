"""Every schedule's table is complete and free of deadlock, and its bubble is the closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.config.settings_base import kinds
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from lmtrain.schedules.schedule_simulator import Costs, Timeline, activations_held, simulate
from lmtrain.schedules.table import Action, Kind, ScheduleTable

NAMES = list(kinds(PipelineSchedule))
SIZES = st.tuples(st.sampled_from(NAMES), st.integers(1, 8), st.integers(2, 4), st.integers(1, 40))
UNEVEN = Costs(forward=1.0, input=1.25, weight=0.75)


def build(name: str, num_ranks: int, chunks: int, num_microbatches: int) -> ScheduleTable:
    schedule = schedule_named(name)
    chunks = chunks if schedule.allows(chunks) else schedule.chunks
    return schedule.table(num_ranks, chunks, num_microbatches)


@given(SIZES)
def test_any_size_is_complete_and_never_halts(size: tuple[str, int, int, int]) -> None:
    table = build(*size)  # is checked as it is made
    assert table.num_ranks == size[1]
    for rank, actions in enumerate(table.actions):
        for stage in (stage for stage, owner in enumerate(table.rank_of) if owner == rank):
            for kind in Kind:  # a receiver can take what comes in the order in which it was sent
                of_stage = [a.microbatch for a in actions if (a.stage, a.kind) == (stage, kind)]
                assert of_stage == sorted(of_stage)


@pytest.mark.parametrize("name", NAMES)
def test_every_table_up_to_eight_ranks_is_complete_and_never_halts(name: str) -> None:
    for p in range(1, 9):
        for m in (1, p, p + 1, 2 * p, 2 * p + 1):
            for chunks in (c for c in (1, 2, 3, 4) if schedule_named(name).allows(c)):
                table = build(name, p, chunks, m)
                assert {len(row) for row in table.actions} == {len(table.actions[0])}, (p, m)
                assert simulate(table).makespan > 0


@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 40))
def test_bubbles_of_megatron(p: int, v: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert simulate(build(name, p, 1, m)).bubble == pytest.approx((p - 1) / m)
    if m >= p:  # also where p does not divide m
        assert simulate(build("interleaved", p, v, m)).bubble == pytest.approx((p - 1) / (v * m))


@given(st.integers(1, 8), st.integers(1, 40))
def test_bubbles_of_zero_bubble(p: int, m: int) -> None:
    c = UNEVEN
    if m >= p:
        work = m * (c.forward + c.input + c.weight)
        bubble = simulate(build("zb_h1", p, 1, m), c).makespan - work
        assert bubble == pytest.approx((p - 1) * (c.forward + c.input - c.weight), abs=1e-9)
    if m >= 2 * p:
        timeline = simulate(build("zb_v", p, 2, m))
        assert timeline.makespan == 6 * m + p - 1
        assert [waits(timeline, rank) for rank in range(p)] == [0] * p


def waits(timeline: Timeline, rank: int) -> float:
    """Idle time between a rank's first action and its last."""
    spans = [span for span in timeline.spans if span.rank == rank]
    return max(s.end for s in spans) - min(s.start for s in spans) - timeline.busy[rank]


@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 40))
def test_activations_held(p: int, v: int, m: int) -> None:
    assert activations_held(build("gpipe", p, 1, m)) == [m] * p
    assert activations_held(build("1f1b", p, 1, m)) == [min(p - rank, m) for rank in range(p)]
    assert activations_held(build("zb_h1", p, 1, m)) == [min(p, m)] * p
    assert max(activations_held(build("zb_v", p, 2, m))) <= min(2 * p, 2 * m)
    group = -(-m // max(m // p, 1))  # microbatches that pass together
    bound = [min(2 * (p - rank - 1) + (v - 1) * group + 1, v * m) for rank in range(p)]
    assert activations_held(build("interleaved", p, v, m)) == bound


def test_sending_takes_time() -> None:
    slow = simulate(build("gpipe", 2, 1, 1), Costs(send=0.5))
    assert slow.makespan == 1 + 0.5 + 1 + 2 + 0.5 + 2


def test_what_a_rank_hands_to_itself_is_there_at_once() -> None:
    """The pipeline turns round on the last rank: of four stages in a row the two in the middle are its own."""
    table = build("zb_v", 2, 2, 1)
    late = simulate(table, Costs(send=0.5)).makespan - simulate(table).makespan
    assert late == pytest.approx(4 * 0.5), "to the last rank and back, forward and backward"


def test_a_wrong_table_is_refused() -> None:
    f, b = Kind.FORWARD, Kind.BACKWARD
    rows = ((Action(f, 0, 0), Action(b, 0, 0)), (Action(f, 1, 0), Action(b, 1, 0)))
    ScheduleTable((0, 1), 1, rows)
    for wrong, said in (
        ((rows[0], rows[1][:1]), "repeats or lacks B1.0"),
        ((rows[0], (*rows[1], Action(f, 1, 0))), "repeats or lacks F1.0"),
        ((rows[1], rows[0]), "F1.0 on rank 0, which does not hold"),
        ((tuple(reversed(rows[0])), rows[1]), "wait for each other: rank 0 at B0.0, rank 1 at F1.0"),
    ):
        with pytest.raises(ValueError, match=said):
            ScheduleTable((0, 1), 1, wrong)


def test_chunks_that_a_schedule_does_not_have() -> None:
    with pytest.raises(ValueError, match="1f1b cannot have 2 stages a rank: it has one stage a rank"):
        schedule_named("1f1b").table(2, 2, 4)
    with pytest.raises(ValueError, match="needs two stages"):
        schedule_named("interleaved").table(2, 1, 4)
    assert schedule_named("zb_v").ranks_of_stages(3, 2) == (0, 1, 2, 2, 1, 0)
    assert schedule_named("interleaved").ranks_of_stages(2, 2) == (0, 1, 0, 1)
