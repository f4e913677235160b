"""Rank 0 finds slow ranks in the rows of all ranks, reports each once, and records them in metrics."""

from __future__ import annotations

import numpy as np
import pytest

from lmtrain.layout import Layout
from lmtrain.observe.measure.process_and_gpu_memory import Memory
from lmtrain.observe.stragglers.find_slow_ranks import WINDOWS_IN_A_ROW
from lmtrain.train.straggler_watch import (
    COLUMNS,
    OWN_WORK,
    STEPS,
    StragglerWatch,
    neighbour_pairs,
    neighbours,
    peer_groups,
)

MS = 1_000_000
LAYOUT = Layout(pp=2, dp_shard=2, tp=2)
HOSTS = ["n0"] * 4 + ["n1"] * 4
MEMORY = Memory("cpu", 0)


def rows(layout: Layout, link_ms: dict[int, float] | None = None, **slower_ms: int) -> np.ndarray:
    """100 ms of work a step of every rank, and a message of 2 ms each way over every link, by clocks that differ."""
    found = np.zeros((layout.world_size, len(COLUMNS) + 1), dtype=np.int64)
    found[:, : len(OWN_WORK)] = np.array([0, 30, 60, 10]) * MS
    found[:, len(OWN_WORK)], found[:, len(OWN_WORK) + 1] = (
        25 * MS,
        12 * MS,
    )  # waits for messages and in other collectives
    for name, more in slower_ms.items():
        kind, rank = name.rsplit("_", 1)
        found[int(rank), COLUMNS.index(kind)] += more * MS
    clock = np.arange(layout.world_size) * 10**12 + 10**15
    ends, back = len(OWN_WORK) + 2, len(OWN_WORK) + (2 if layout.pp == 2 else 4)
    for number, (a, b) in enumerate(neighbour_pairs(layout)):
        one_way = int((2.0 + (link_ms or {}).get(number, 0.0)) * MS)
        found[a, ends] = STEPS * clock[a]
        found[b, back + 1] = STEPS * (clock[b] + one_way)
        found[b, back] = STEPS * clock[b]
        found[a, ends + 1] = STEPS * (clock[a] + one_way)
    return found


def told(pace: StragglerWatch, table: np.ndarray, windows: int = WINDOWS_IN_A_ROW) -> list[str]:
    return [line for _ in range(windows) for line in pace.receive_rows(table)]


def test_a_slow_rank_is_said_once_and_stays_in_the_rows_while_it_is() -> None:
    pace = StragglerWatch(LAYOUT, 0, HOSTS, [0, 1], MEMORY, on_host=True)
    assert pace.facts() == {}
    lines = told(pace, rows(LAYOUT, backward_5=9, forward_5=2), 3 * WINDOWS_IN_A_ROW)
    assert lines == [
        "rank 5 on n1 (pp 1, dp_shard 0, tp 1) is slow: its own work takes 11.0% longer than that of 3 other ranks "
        "with this work, most of all backward with 69.0 ms a step beside 60.0 ms"
    ]
    assert pace.facts() == {
        "straggler_slowest": 5, "straggler_slowest_by": 0.11, "straggler_rank": 5, "straggler_host": "n1",
        "straggler_coordinate": {"pp": 1, "dp_shard": 0, "tp": 1}, "straggler_span": "backward", "straggler_by": 0.11,
        "straggler_span_s": 0.069, "straggler_usual_s": 0.06, "straggler_ranks": [5],
        "straggler_exposed": pytest.approx(12 / 138.4, abs=1e-3),
        "straggler_bubble": pytest.approx(25 / 138.4, abs=1e-3),
    }  # fmt: skip
    assert told(pace, rows(LAYOUT)) == ["rank 5 on n1 (pp 1, dp_shard 0, tp 1) keeps pace again"]
    assert "straggler_rank" not in pace.facts()


def test_what_each_rank_holds_comes_with_its_row() -> None:
    memory = Memory("cpu", 0)
    pace, table = StragglerWatch(Layout(tp=2), 0, ["n"] * 2, [0], memory, on_host=True), rows(Layout(tp=2))
    assert memory.grown_peaks() is None
    table[:, len(COLUMNS)] = 5000, 4000
    pace.receive_rows(table)
    assert memory.grown_peaks() == [5000, 4000]
    held = memory.measure()[0]
    for _ in range(2 + STEPS):  # of which the first two are not counted
        pace.work.begin_step()
        pace.work.end_step(0.0)
    assert pace.numbers_to_send()[len(COLUMNS) :] == [held]


def test_who_waits_is_not_slow() -> None:
    pace = StragglerWatch(LAYOUT, 0, HOSTS, [0, 1], MEMORY, on_host=True)
    assert told(pace, rows(LAYOUT, messages_1=500, collectives_2=500), 20) == []


def test_stages_are_compared_where_they_are_equal() -> None:
    layout = Layout(pp=4)
    assert peer_groups(layout, [("first", 0), "middle", "middle", ("last", 3)]) == [[0], [1, 2], [3]]
    pace = StragglerWatch(layout, 0, ["n"] * 4, [0, 1, 1, 2], MEMORY, on_host=True)
    assert told(pace, rows(layout, forward_0=50, forward_3=50), 20) == []
    (line,) = told(pace, rows(layout, forward_2=50))
    assert line.startswith("rank 2 on n (pp 2) is slow: its own work takes 50.0% longer than that of the one other ")


@pytest.mark.parametrize("layout", [Layout(pp=2, dp_shard=3), Layout(pp=4, tp=2), Layout(pp=3, vp=2)])
def test_a_slow_link_is_named_whatever_the_clocks(layout: Layout) -> None:
    pace = StragglerWatch(layout, 0, ["n"] * layout.world_size, list(range(layout.pp)), MEMORY, on_host=True)
    assert told(pace, rows(layout), 20) == []
    a, b = neighbour_pairs(layout)[1]
    (line,) = told(pace, rows(layout, {1: 3.0}))
    assert line.startswith(f"the link between rank {a} on n (pp")
    assert f" and rank {b} on n (" in line
    assert "a message there and back takes 10.0 ms, over the " in line
    assert line.endswith("that carry the same 4.0 ms")
    facts = pace.facts()
    assert (facts["straggler_link"], facts["straggler_link_s"], facts["straggler_link_usual_s"]) == (
        [a, b],
        0.01,
        0.004,
    )


def test_links_between_hosts_are_compared_with_links_between_hosts() -> None:
    layout = Layout(pp=4)
    pace = StragglerWatch(layout, 0, ["a", "a", "b", "b"], [0, 1, 1, 2], MEMORY, on_host=True)
    assert told(pace, rows(layout, {1: 20.0}), 20) == []


def test_a_message_that_was_not_waited_for_tells_nothing() -> None:
    layout = Layout(pp=2, dp_shard=3)
    pace, table = StragglerWatch(layout, 0, ["n"] * 6, [0, 1], MEMORY, on_host=True), rows(layout, {1: 3.0})
    table[1, len(OWN_WORK) + 3] = 0
    assert told(pace, table, 20) == []


def test_each_pair_of_neighbours_is_seen_from_both_ends() -> None:
    for layout in (Layout(pp=2, tp=2), Layout(pp=3, dp_shard=2), Layout(pp=4, vp=2)):
        for a, b in neighbour_pairs(layout):
            assert neighbours(layout, a)[0] == b
            assert neighbours(layout, b)[-1] == a
    assert neighbours(Layout(tp=4), 1) == ()


def test_on_a_device_the_host_tells_nothing_of_waits_and_links() -> None:
    pace = StragglerWatch(LAYOUT, 0, HOSTS, [0, 1], MEMORY, on_host=False)
    assert pace.work.neighbours == ()
    assert told(pace, rows(LAYOUT, forward_5=50)) == []
    assert pace.facts() == {}
