"""The path is without gaps, as long as the step, and goes over the rank that holds the others up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from lmtrain.layout import Layout
from lmtrain.observe.timeline.merge_ranks import merge_traces
from lmtrain.observe.timeline.step_breakdown import critical_path
from tests.unit.observe.timeline.made_up import Made


def test_path_of_a_pipeline(tmp_path: Path) -> None:
    """One forward down to the slowest rank, all of its work, one backward up again: no bubble at all."""
    made = Made(layout=Layout(pp=3), slow={2: 1.2}, num_microbatches=4, steps=(10,)).write(tmp_path)
    (segment,) = merge_traces(tmp_path).segments
    hops = critical_path(segment, 10)
    for one, other in pairwise(hops):
        assert one.end_s == pytest.approx(other.begin_s, abs=1e-9)
    assert hops[0].begin_s == 0
    assert hops[-1].end_s == pytest.approx(made.timelines[0].makespan / 1e3 + 0.5e-3 + 0.3e-3 + 1e-3, abs=2e-4)
    work = [(hop.kind, hop.rank) for hop in hops if hop.class_ == "compute"]
    last = [("forward", 2), ("backward", 2)] * 4
    assert work == [("forward", 0), ("forward", 1), *last, ("backward", 1), ("backward", 0)]
    assert not any(hop.class_ == "bubble" for hop in hops)


def test_path_over_the_slow_member(tmp_path: Path) -> None:
    Made(layout=Layout(dp_shard=4), slow={2: 1.5}, num_microbatches=2, steps=(10,)).write(tmp_path)
    (segment,) = merge_traces(tmp_path).segments
    hops = critical_path(segment, 10)
    assert {hop.rank for hop in hops if hop.class_ == "compute"} == {2}
    assert critical_path(segment, 11) == []


def test_path_where_the_sender_is_missing(tmp_path: Path) -> None:
    """It stays on the rank that waited, for nobody knows for whom."""
    Made(layout=Layout(pp=2), num_microbatches=2, steps=(10,)).write(tmp_path)
    (tmp_path / "trace" / "rank-00000.spans").unlink()
    (segment,) = merge_traces(tmp_path).segments
    hops = critical_path(segment, 10)
    assert {hop.rank for hop in hops} == {1}
    assert sum(hop.seconds for hop in hops) == pytest.approx(hops[-1].end_s)
