"""The classes of a step add up to it, and the bubble is the schedule's own, whatever the clocks said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmtrain.config.settings_base import kinds
from lmtrain.layout import Layout
from lmtrain.observe.spans.span_file import Kind, read_spans
from lmtrain.observe.timeline.merge_ranks import merge_traces
from lmtrain.observe.timeline.step_breakdown import heat_by_host, rank_heat, step_times, timeline_rows
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from tests.unit.observe.timeline.made_up import Made, write_spans


def made(folder: Path, schedule: str, **values: object) -> Made:
    vp = schedule_named(schedule).chunks
    return Made(layout=Layout(pp=4, vp=vp), schedule=schedule, **values).write(folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [*kinds(PipelineSchedule)])
def test_classes_of_every_schedule(tmp_path: Path, schedule: str) -> None:
    truth = made(tmp_path, schedule, steps=(10, 11), message=0.05, handing=0.0)
    (segment,) = merge_traces(tmp_path).segments
    times = step_times(segment)
    steps = segment.spans[segment.spans["kind"] == Kind.STEP]
    length = {(s["step"], s["rank"]): (s["end_ns"] - s["begin_ns"]) / 1e9 for s in steps}
    for i, step in enumerate(times.steps):
        for j, rank in enumerate(times.ranks):
            assert times.seconds[i, j].sum() == pytest.approx(length[step, rank], abs=1e-8)
    mean = times.mean()
    whole = sum(mean.values())
    busy = [time / 1e3 for time in truth.timelines[0].busy]
    assert mean["compute"] == pytest.approx(np.mean(busy), rel=1e-3)
    assert mean["data"] == pytest.approx(0.5e-3, rel=0.1)
    assert mean["optimizer"] == pytest.approx(1e-3, rel=0.05)
    bubble = truth.timelines[0].makespan / 1e3 - np.mean(busy)
    assert mean["bubble"] + mean["pp"] == pytest.approx(bubble, abs=0.005 * whole)
    assert mean["pp"] < 0.02 * whole


def test_what_waits_for_a_slow_member_of_dp_is_said(tmp_path: Path) -> None:
    Made(layout=Layout(dp_shard=4), slow={2: 1.5}, num_microbatches=4).write(tmp_path)
    (segment,) = merge_traces(tmp_path).segments
    times = step_times(segment)
    waited = np.nanmean(times.waited.sum(axis=2), axis=0)
    assert waited[2] == pytest.approx(0, abs=1e-4)
    assert waited[[0, 1, 3]] == pytest.approx([4 * 9e-3 * 0.5] * 3, rel=0.02)
    assert times.mean()["bubble"] == 0
    found = rank_heat(segment, times)
    assert [round(one.ratio, 1) for one in found] == [1.0, 1.0, 1.5, 1.0]
    assert list(heat_by_host(found)) == ["node1", "node0"]


def test_a_stage_with_more_work_is_not_hot(tmp_path: Path) -> None:
    """The stage with the head has more work: its ranks are compared with each other, and only a slower one is hot."""
    Made(layout=Layout(pp=2, dp_shard=3), slow={3: 2.0, 4: 2.0, 5: 4.0}, steps=(10,), num_microbatches=2).write(
        tmp_path
    )
    (segment,) = merge_traces(tmp_path).segments
    assert [round(one.ratio, 1) for one in rank_heat(segment, step_times(segment))] == [1.0, 1.0, 1.0, 1.0, 1.0, 2.0]


def test_a_ring_that_is_full_has_lost_its_oldest_step(tmp_path: Path) -> None:
    Made(layout=Layout(), num_microbatches=4).write(tmp_path)
    path = tmp_path / "trace" / "rank-00000.spans"
    whole = read_spans(path)
    in_order = whole.spans[np.argsort(whole.spans["end_ns"], kind="stable")]  # as a recorder writes them
    path.unlink()
    write_spans(path, replace(whole.header, capacity=26), in_order)
    (segment,) = merge_traces(tmp_path).segments
    assert segment.steps == [12, 13]
    mean = step_times(segment).mean()
    assert mean["compute"] == pytest.approx(4 * 9e-3, rel=1e-3)


def test_rows_of_a_step(tmp_path: Path) -> None:
    made(tmp_path, "zb_v", num_microbatches=4, steps=(10,))
    (segment,) = merge_traces(tmp_path).segments
    rows = timeline_rows(segment, 10)
    assert {(row.rank, row.stage) for row in rows if row.stage >= 0} == {(r, s) for r in range(4) for s in (r, 7 - r)}
    for row in rows:
        assert all(a.end_s <= b.begin_s + 1e-9 for a, b in zip(row.bars, row.bars[1:], strict=False))
    bars = [bar.what for row in rows if row.stage == 5 for bar in row.bars]
    of_stage = [what for what in bars if what in ("forward", "input", "weight")]
    assert sorted(of_stage) == ["forward"] * 4 + ["input"] * 4 + ["weight"] * 4
