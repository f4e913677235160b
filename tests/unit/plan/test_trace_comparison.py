"""A traced step compared with a replay of its schedule table: equal if the run follows the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtrain.config.settings_base import kinds
from lmtrain.layout import Layout
from lmtrain.observe.timeline.merge_ranks import merge_traces
from lmtrain.observe.timeline.step_breakdown import step_times
from lmtrain.plan.compare_trace_to_schedule import compare_with_replay
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from tests.unit.observe.timeline.made_up import Made


@pytest.mark.parametrize("schedule", [*kinds(PipelineSchedule)])
def test_the_replay_is_what_was_made_up(tmp_path: Path, schedule: str) -> None:
    layout = Layout(pp=3, vp=schedule_named(schedule).chunks)
    made = Made(layout=layout, schedule=schedule, num_microbatches=6, steps=(10,), handing=0.0).write(tmp_path)
    (segment,) = merge_traces(tmp_path).segments
    found = compare_with_replay(segment, step_times(segment))
    assert found is not None
    assert found.num_microbatches == 6
    assert found.pipeline_s == pytest.approx(made.timelines[0].makespan / 1e3, rel=2e-3)
    assert found.replayed_pipeline_s == pytest.approx(found.pipeline_s, rel=2e-3)
    assert found.replayed_bubble_s == pytest.approx(found.bubble_s, abs=1e-3)
    if schedule in ("gpipe", "1f1b"):
        assert found.even_bubble_s == pytest.approx((3 - 1) * 9e-3, rel=1e-3)


def test_uneven_stages_are_the_tables_own(tmp_path: Path) -> None:
    """What the closed form does not have, the replay has."""
    Made(layout=Layout(pp=3), slow={1: 1.5}, num_microbatches=6, steps=(10,), message=0.02).write(tmp_path)
    (segment,) = merge_traces(tmp_path).segments
    found = compare_with_replay(segment, step_times(segment))
    assert found is not None
    assert found.replayed_bubble_s > 1.4 * found.even_bubble_s
    assert found.bubble_s == pytest.approx(found.replayed_bubble_s, rel=0.03)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp_shard": 2}, {"tp": 2, "dp_replicate": 2}], ids=str)
def test_the_slowest_pipeline_is_the_one_that_all_wait_for(tmp_path: Path, axes: dict[str, int]) -> None:
    layout = Layout(pp=2, **axes)
    slow = dict.fromkeys(range(1, layout.world_size, layout.dp * layout.tp), 1.5)
    made = Made(layout=layout, slow=slow, steps=(10,), handing=0.0).write(tmp_path)
    (segment,) = merge_traces(tmp_path).segments
    found = compare_with_replay(segment, step_times(segment))
    assert found is not None
    assert found.replayed_pipeline_s == pytest.approx(max(one.makespan for one in made.timelines) / 1e3, rel=0.01)


def test_without_a_pipeline_or_its_table(tmp_path: Path) -> None:
    Made(layout=Layout(dp_shard=2), num_microbatches=2, steps=(10,)).write(tmp_path)
    Made(layout=Layout(pp=2), num_microbatches=2, steps=(10,), start=1, began_s=500).write(tmp_path)
    (tmp_path / "trace" / "rank-00001.1.spans").unlink()
    for segment in merge_traces(tmp_path).segments:
        assert compare_with_replay(segment, step_times(segment)) is None
