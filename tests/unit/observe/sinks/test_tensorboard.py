"""What TensorBoard itself makes of a run: curves, hyperparameters, the settings' text, pages, histograms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.sinks.tensorboard import EventWriter, TensorBoardSink
from lmtrain.runfolder.tensorboard_metric_names import EDGES, Histogram

SETTINGS = {
    "model": {"kind": "gpt", "width": 32, "tied": True, "window": None}, "optim": {"lr": 0.003, "betas": [0.9, 0.95]},
    "run": {"dir": "runs/a"},
}  # fmt: skip


def counts_of(*numbers: float) -> Histogram:
    counts = [0] * (len(EDGES) + 1)
    for number in numbers:
        counts[sum(edge < number for edge in EDGES)] += 1
    return Histogram(min(numbers), max(numbers), sum(numbers), sum(n * n for n in numbers), counts)


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder: Path = tmp_path_factory.mktemp("events")
    sink = TensorBoardSink(EventWriter(folder, 0), SETTINGS, 1000.0)
    sink.write_row({"event": "step", "step": 1, "loss": 2.0, "lr": 0.5, "mfu": None})
    sink.write_histograms(1, {"weights/a": counts_of(-3.0, -0.5, 0.0, 0.5, 0.5), "gradients/a": counts_of(1e-20)})
    sink.write_row({"event": "stop", "step": 1, "stopped_by": None})
    sink.close()
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def test_curves(read: Any) -> None:
    assert sorted(read.Tags()["scalars"]) == ["loss/train", "optim/lr"]
    assert [(e.step, e.value) for e in read.Scalars("loss/train")] == [(1, 2.0)]


def test_the_text_of_the_settings(read: Any) -> None:
    (text,) = read.Tensors("settings")
    assert '"width": 32' in text.tensor_proto.string_val[0].decode()


def test_hyperparameters(read: Any) -> None:
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")

    def told(tag: str) -> Any:
        found = plugin.HParamsPluginData()
        found.ParseFromString(read.SummaryMetadata(tag).plugin_data.content)
        return found

    start = told("_hparams_/session_start_info").session_start_info
    assert start.start_time_secs == 1000.0
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert values == {
        "model.kind": "gpt", "model.width": 32.0, "model.tied": True, "model.window": "null", "optim.lr": 0.003,
        "optim.betas": "[0.9, 0.95]",
    }  # fmt: skip
    assert told("_hparams_/session_end_info").session_end_info.status == 1


def test_pages_of_curves(read: Any) -> None:
    layout = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2").Layout()
    (event,) = read.Tensors("custom_scalars__config__")
    layout.ParseFromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["loss", "quality", "optimizer", "machine"]
    assert list(layout.category[0].chart[0].multiline.tag) == ["loss/train$", "loss/valid.*", "loss/ema.*"]


def test_histograms(read: Any) -> None:
    (event,) = read.Histograms("weights/a")
    found = event.histogram_value
    assert (event.step, found.min, found.max, found.num) == (1, -3.0, 0.5, 5)
    assert found.sum == -2.5
    assert sum(found.bucket) == 5
    inside = dict(zip(found.bucket_limit, found.bucket, strict=True))
    assert {limit for limit, count in inside.items() if count} == {
        next(edge for edge in EDGES if edge >= number) for number in (-3.0, -0.5, 0.0, 0.5)
    }
    (tiny,) = read.Histograms("gradients/a")
    assert tiny.histogram_value.num == 1
