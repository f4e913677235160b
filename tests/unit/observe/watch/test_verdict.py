"""Who is to blame, over tables of what ranks do: the stopped, the late, the odd; and never the healthy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.observe.hang_watch.hang_verdict import (
    DONE,
    FAILED,
    LOST,
    MIN_LIMIT_S,
    RUNNING,
    STOPPED,
    Limits,
    RankRow,
    judge,
)

LONG = MIN_LIMIT_S + 1


def reached(limits: Limits) -> Limits:
    """In a run that has done a step."""
    limits.record_step(6)
    limits.record_step(7)
    return limits


LEARNT = reached(Limits(600.0))
LEARNT.record_times({"backward": 0.1, "forward": 0.1, "save": 12.0, "losses": 0.2, "the gradient norm": 0.2})


def row(rank: int, phase: str = "backward", stood_s: float = 0.0, what: str = "", **more: Any) -> RankRow:
    return RankRow(rank, "n1", phase, 7, collective=what, still_s=stood_s, **more)


def waiting(rank: int, stood_s: float = LONG, what: str = "losses", **more: Any) -> RankRow:
    return row(rank, "collective", stood_s, what, **more)


def test_limits_come_from_the_run_itself() -> None:
    assert LEARNT.limit_s("backward") == MIN_LIMIT_S
    assert LEARNT.limit_s("save") == 120.0
    assert LEARNT.limit_s("evaluation") == 600.0  # nothing is known of it yet
    short, limits = reached(Limits(5.0)), reached(Limits(600.0))
    short.record_times({"save": 12.0})
    assert short.limit_s("save") == 5.0
    limits.record_times({"save": 40.0})
    limits.record_times({"save": 4.0})
    assert limits.limit_s("save") == 400.0


def test_what_earlier_starts_took_gives_more_time_and_never_less() -> None:
    """A start with compile after one without, a cold load after a warm one: all are given the time."""
    limits = reached(Limits(600.0, {"load": 0.5, "forward": 0.1, "save": 12.0}))
    for phase in ("load", "forward"):
        assert judge([waiting(0), row(1, phase, LONG), row(2, phase, LONG)], limits) is None
    limits.record_times({"forward": 0.1, "save": 1.0})
    verdict = judge([waiting(0), row(1, "forward", LONG)], limits)
    assert verdict is not None
    assert verdict.ranks == [1]
    assert limits.limit_s("save") == 120.0


def test_nobody_is_late_before_the_first_step_is_done() -> None:
    """One node may have in memory what the others still read."""
    limits = Limits(600.0)
    limits.record_times({"load": 0.5})
    for step in (-1, 7, 7):
        limits.record_step(step)
        assert judge([waiting(0), row(1, "load", LONG)], limits) is None
    limits.record_step(8)
    assert judge([waiting(0), row(1, "load", LONG)], limits) is not None


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        pytest.param([waiting(0), row(1, stood_s=LONG)], [1], id="late"),
        pytest.param([row(0, stood_s=LONG), waiting(1), waiting(2)], [0], id="rank 0 is late"),
        pytest.param([waiting(0), row(1, stood_s=LONG), row(2, stood_s=LONG + 5)], [2, 1], id="two, the first first"),
        pytest.param([waiting(0), row(1, stood_s=LONG, state=STOPPED)], [1], id="stopped"),
        pytest.param([waiting(0), row(1, stood_s=LONG), waiting(2, state=STOPPED)], [2], id="stopped before late"),
        pytest.param([waiting(0, 1.0), row(1, silent_s=31.0)], [1], id="silent"),
        pytest.param(
            [waiting(0), waiting(1, what="the gradient norm", misordered=(7, "losses", "the gradient norm"))], [1],
            id="skipped",
        ),
        pytest.param(
            [waiting(0), RankRow(1, "n1", "collective", 8, collective="losses", still_s=LONG)], [1], id="a step ahead"
        ),
        pytest.param([waiting(0), waiting(1, what="the gradient norm")], [0, 1], id="who knows"),
        pytest.param([waiting(0, 1.0), row(1, state=LOST, reason="was ended by SIGKILL")], [1], id="lost"),
        pytest.param([waiting(0, 1.0), row(1, state=FAILED, reason="no room", code=74)], [1], id="failed"),
        pytest.param(
            [waiting(0, 1.0, state=LOST, reason="was ended by SIGABRT"), waiting(1, misordered=(7, "losses", "a sum"))],
            [1],
            id="aborted, because another left something out",
        ),
        pytest.param(
            [row(0, state=FAILED, reason="waited", code=76), row(1, state=LOST, reason="x")], [1],
            id="lost before those that waited for it",
        ),
    ],
)  # fmt: skip
def test_the_one_to_blame(rows: list[RankRow], ranks: list[int]) -> None:
    verdict = judge(rows, LEARNT)
    assert verdict is not None
    assert verdict.ranks == ranks


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([row(0), row(1)], id="all work"),
        pytest.param([waiting(0, 500.0), row(1, stood_s=20.0)], id="one has time left, however long others wait"),
        pytest.param([waiting(0, 500.0), row(1, "evaluation", 400.0)], id="nothing is known of that phase"),
        pytest.param([waiting(0, 100.0), row(1, "save", 100.0)], id="saves have taken long before"),
        pytest.param([waiting(0), row(1, stood_s=LONG), row(2, stood_s=1.0)], id="someone still moves"),
        pytest.param([waiting(0), waiting(1, 2.0)], id="the last has just come"),
        pytest.param([row(0, stood_s=LONG, state=DONE), row(1)], id="done"),
        pytest.param([row(0, stood_s=5.0, state=STOPPED), waiting(1, 5.0)], id="stopped for a moment"),
        pytest.param([row(0, stood_s=10_000.0)], id="nobody waits for the only one"),
        pytest.param([], id="nobody"),
    ],
)
def test_no_alarm(rows: list[RankRow]) -> None:
    assert judge(rows, LEARNT) is None


def test_a_collective_that_failed_is_somebodys_fault_before_any_limit() -> None:
    rows = [waiting(0, 1.0), row(1, stood_s=2.0), waiting(2, 1.0)]
    assert judge(rows, LEARNT) is None
    verdict = judge(rows, LEARNT, culprit_asked=True)
    assert verdict is not None
    assert verdict.ranks == [1]
    # nobody stands out, so there is no verdict
    assert judge([waiting(0, 1.0), waiting(1, 1.0)], LEARNT, culprit_asked=True) is None


def test_who_asks_waits_wherever_its_marks_are() -> None:
    """What has failed in the thread that saves is raised later, in another place."""
    verdict = judge([row(0, "optimizer", 1.0, asks_culprit=True), row(1, "save", 6.0)], LEARNT, culprit_asked=True)
    assert verdict is not None
    assert verdict.ranks == [1]


def test_what_is_new_to_all_is_nobodys_fault() -> None:
    odd = (7, "losses", "sums of a validation")
    verdict = judge([waiting(0, misordered=odd), waiting(1, misordered=odd)], LEARNT)
    assert verdict is not None
    assert verdict.ranks == [0, 1]


def way(*sums: int, step: int = 7, before: int = 99) -> tuple[int, int, dict[int, int]]:
    return step, before, dict(enumerate(sums, 1))


@pytest.mark.parametrize(
    ("ways", "ranks"),
    [
        pytest.param([way(1, 2, 3), way(1, 2), way(1, 7), way(1, 2, 3)], [2], id="one of four"),
        pytest.param([way(1, 2, 3), way(1, 2), way(1), way(1, 2, 3)], [0, 1, 2, 3], id="some are not as far"),
        pytest.param([way(1, 2), way(1, 7)], [0, 1], id="of two nobody knows"),
        pytest.param([way(1, 2), way(5, 6, before=98), way(1, 2), way(5, 6, before=98)], [0, 1, 2, 3], id="two stages"),
        pytest.param([way(1, 2), way(1, 2), way(1, 7, before=0)], [0, 1, 2], id="in its first step"),
        pytest.param([way(1, 2), way(1, 2), way(1, 7, step=6)], [0, 1, 2], id="of another step"),
        pytest.param([way(1, 2), way(1, 2), None], [0, 1, 2], id="not told"),
    ],
)
def test_who_took_another_way_through_the_collectives(ways: list[Any], ranks: list[int]) -> None:
    verdict = judge([waiting(rank, order=one) for rank, one in enumerate(ways)], LEARNT)
    assert verdict is not None
    assert verdict.ranks == ranks
    assert ("ran other collectives" in verdict.text) == (len(ranks) == 1)


def test_the_words_name_rank_host_phase_step_and_time() -> None:
    late = RankRow(2, "n1", "backward", 7, microbatch=1, stage=0, still_s=LONG)
    verdict = judge([waiting(0), waiting(1), late], LEARNT)
    assert verdict is not None
    assert verdict.text == (
        "rank 2 on n1 has been in backward of step 7, microbatch 1, stage 0, for 31 s, while ranks 0 and 1 wait in "
        "collective (losses) of step 7. Its limit is 30 s, by parallel.timeout_s=600 and this run's times."
    )


states = st.sampled_from([RUNNING, RUNNING, RUNNING, STOPPED, DONE, LOST])
keys = ["backward", "forward", "save", "evaluation"]
rows_of = st.builds(
    lambda phase, what, *rest: (phase, what if phase == "collective" else "", *rest),
    st.sampled_from([*keys, "collective", "collective"]), st.sampled_from(["losses", "the gradient norm", "a sum"]),
    st.floats(0, 2000), st.floats(0, 60), states,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(rows_of, min_size=1, max_size=8), st.booleans())
def test_nobody_healthy_is_named(table: list[tuple[str, str, float, float, str]], asked: bool) -> None:
    """Who is in time is never to blame, and who waits is not while somebody else can be."""
    rows = [
        RankRow(rank, "n", phase, 7, collective=what, still_s=stood_s, silent_s=silent_s, state=state, reason="x")
        for rank, (phase, what, stood_s, silent_s, state) in enumerate(table)
    ]
    verdict = judge(rows, LEARNT, asked)
    if verdict is None:
        return
    busy = [one for one in rows if one.state == RUNNING and not one.is_waiting and one.silent_s <= 30]
    for one in verdict.rows:
        assert one.state != DONE
        in_time = one.still_s <= LEARNT.limit_s(one.limit_key)
        gone = one.state in (LOST, STOPPED) or one.silent_s > 30
        assert gone or asked or not in_time
        if one.is_waiting and not gone:
            assert not [other for other in busy if other.still_s > LEARNT.limit_s(other.limit_key)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 29), min_size=2, max_size=8), st.lists(st.floats(0, 2000), min_size=8, max_size=8))
def test_no_alarm_while_one_that_works_is_in_time(working: list[float], waits: list[float]) -> None:
    rows = [row(rank, stood_s=stood_s) for rank, stood_s in enumerate(working)]
    rows += [waiting(len(rows) + index, stood_s) for index, stood_s in enumerate(waits)]
    assert judge(rows, LEARNT) is None
