"""Event files that TensorBoard itself reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.sinks.tensorboard import EventWriter


def _read(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_reads_back_scalars_and_text(tmp_path: Path) -> None:
    times = iter(range(1000, 2000))
    writer = EventWriter(tmp_path, 0, clock=lambda: float(next(times)))
    for step in (1, 127, 128, 300, 2**40):
        writer.write_scalar("loss/train", 1.0 / step, step)
    writer.write_scalar("lr", float("nan"), 1)
    for step, value in enumerate((1e300, -1e300, 3e38)):
        writer.write_scalar("large", value, step)
    writer.write_text("config", "steps: 10 — naïve")
    writer.close()

    events = _read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["large", "loss/train", "lr"]
    assert [e.value for e in events.Scalars("large")] == pytest.approx([float("inf"), float("-inf"), 3e38])
    read = events.Scalars("loss/train")
    assert [e.step for e in read] == [1, 127, 128, 300, 2**40]
    assert [e.value for e in read] == pytest.approx([1.0 / e.step for e in read], rel=1e-7)
    assert [e.wall_time for e in read] == [1002.0, 1003.0, 1004.0, 1005.0, 1006.0]
    (text,) = events.Tensors("config")
    assert text.tensor_proto.string_val[0].decode() == "steps: 10 — naïve"
    assert events.SummaryMetadata("config").plugin_data.plugin_name == "text"


def test_a_row_can_be_read_while_the_writer_is_open(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    writer.write_scalar("loss", 2.0, 1)
    assert [e.value for e in _read(tmp_path).Scalars("loss")] == [2.0]
    writer.close()


def test_a_resumed_run_purges_what_the_first_wrote_beyond_its_start(tmp_path: Path) -> None:
    first = EventWriter(tmp_path, 0)
    for step in range(1, 11):
        first.write_scalar("loss", 1.0, step)
    first.close()
    second = EventWriter(tmp_path, 5)
    for step in range(6, 8):
        second.write_scalar("loss", 0.5, step)
    second.close()
    read = [(e.step, e.value) for e in _read(tmp_path).Scalars("loss")]
    assert read == [*((step, 1.0) for step in range(1, 6)), (6, 0.5), (7, 0.5)]


def test_files_sort_in_the_order_they_were_opened(tmp_path: Path) -> None:
    for _ in range(12):
        EventWriter(tmp_path, 0, clock=lambda: 0.0).close()
    made = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert made == sorted(tmp_path.iterdir())
    assert len(made) == 12
