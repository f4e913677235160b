"""Skewed, drifting files come onto one clock, start behind start; what is missing or damaged is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmtrain.errors import DataError, MissingInputError
from lmtrain.layout import Layout
from lmtrain.observe.timeline.merge_ranks import Segment, merge_traces
from tests.unit.observe.timeline.made_up import WALL_NS, Made


def off_ms(segment: Segment, made: Made) -> np.ndarray:
    return np.concatenate([
        np.abs(segment.spans[segment.spans["rank"] == rank][name] - made.truth[rank][name] - WALL_NS) / 1e6
        for rank in segment.ranks for name in ("begin_ns", "end_ns")
    ])  # fmt: skip


CASES = [(Layout(pp=4, vp=2), "zb_v"), (Layout(pp=2, dp_shard=2), "1f1b"), (Layout(dp_shard=3), "1f1b")]


@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_spans_lie_where_they_were(tmp_path: Path, layout: Layout, schedule: str) -> None:
    made = Made(layout=layout, schedule=schedule, num_microbatches=4, gap_s=0.5).write(tmp_path)
    (segment,) = merge_traces(tmp_path).segments
    assert off_ms(segment, made).max() < 0.1
    assert segment.notes == ()
    assert (segment.layout, segment.schedule, segment.steps) == (layout, schedule, [10, 11, 12, 13])
    assert segment.hosts == ["node0", "node1"]


def test_a_start_at_another_layout_lies_behind(tmp_path: Path) -> None:
    first = Made(num_microbatches=4).write(tmp_path)
    second = Made(layout=Layout(pp=2), start=1, began_s=500, num_microbatches=4, seed=7).write(tmp_path)
    one, other = merge_traces(tmp_path).segments
    assert off_ms(one, first).max() < 0.1
    assert off_ms(other, second).max() < 0.1
    assert one.spans["end_ns"].max() < other.spans["begin_ns"].min()


def test_a_wall_clock_that_was_set_back_does_not_put_a_start_above_another(tmp_path: Path) -> None:
    Made(num_microbatches=2, began_s=500).write(tmp_path)
    Made(num_microbatches=2, began_s=400, start=1).write(tmp_path)
    one, other = merge_traces(tmp_path).segments
    assert one.spans["end_ns"].max() <= other.spans["begin_ns"].min()


def test_steps_far_apart_have_a_drift_each(tmp_path: Path) -> None:
    """A clock that drifts by seconds in between is right in both bursts."""
    made = Made(num_microbatches=4, steps=(10, 11, 1000, 1001), gap_s=900.0, drift=2e-4).write(tmp_path)
    (segment,) = merge_traces(tmp_path).segments
    assert len(segment.clocks) >= 2
    assert off_ms(segment, made).max() < 0.2


def test_what_is_missing_or_damaged_is_said(tmp_path: Path) -> None:
    made = Made(layout=Layout(pp=4, dp_shard=2), num_microbatches=4).write(tmp_path)
    files = sorted((tmp_path / "trace").iterdir())
    files[2].unlink()
    files[5].write_bytes(files[5].read_bytes()[:-1000])
    timeline = merge_traces(tmp_path)
    (segment,) = timeline.segments
    assert segment.ranks == [0, 1, 3, 4, 6, 7]
    assert off_ms(segment, made).max() < 0.2
    (damaged,), (missing,) = timeline.notes, segment.notes
    assert "rank-00005.spans ends before the last of its" in damaged
    assert "no file of 2 of 8 ranks: 2, 5" in missing


def test_a_moment_that_damage_has_put_weeks_away_moves_no_clock(tmp_path: Path) -> None:
    made = Made(layout=Layout(pp=2, dp_shard=2), steps=(10, 11), seed=1).write(tmp_path)
    path = tmp_path / "trace" / "rank-00003.spans"
    content = bytearray(path.read_bytes())
    content[5694] ^= 1 << 4  # of the end of a span
    path.write_bytes(content)
    (segment,) = merge_traces(tmp_path).segments
    assert segment.ranks == [0, 1, 2, 3]
    # its end, and that of the one before which the longest of a moment is sorted
    assert (off_ms(segment, made) > 0.2).sum() <= 2, "all others lie where they were"


def test_a_moment_that_no_clock_shows_is_damage(tmp_path: Path) -> None:
    Made(layout=Layout(pp=2, dp_shard=2), steps=(10, 11), seed=1).write(tmp_path)
    path = tmp_path / "trace" / "rank-00003.spans"
    content = bytearray(path.read_bytes())
    content[4103] ^= 1 << 7  # the sign of a beginning
    path.write_bytes(content)
    timeline = merge_traces(tmp_path)
    assert timeline.segments[0].ranks == [0, 1, 2]
    assert "1 of its 72 records have impossible times" in timeline.notes[0]


def test_ranks_that_nothing_joins_are_named(tmp_path: Path) -> None:
    Made(layout=Layout(pp=4), num_microbatches=2).write(tmp_path)
    for rank in (1, 2):
        (tmp_path / "trace" / f"rank-0000{rank}.spans").unlink()
    lonely = Made(layout=Layout(pp=1), start=1, began_s=900, num_microbatches=2).write(tmp_path)
    one, other = merge_traces(tmp_path).segments
    assert one.ranks == [0, 3]
    assert other.notes == ()
    assert off_ms(other, lonely).max() == 0


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"is not the folder of a run: it has no config\.json"):
        merge_traces(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingInputError, match=r"has no traces .* while it runs, `touch .*/TRACE`"):
        merge_traces(tmp_path)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank-00000.spans").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"rank-00000.spans does not begin"):
        merge_traces(tmp_path)
