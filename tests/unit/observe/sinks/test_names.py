"""One name for each number of a row, whoever shows it."""

from __future__ import annotations

import re
from pathlib import Path

from lmtrain.observe.sinks.queued_sink import _CURVES, CHARTS, row_scalars

ROW = {
    "event": "step", "step": 3, "attempt": 1, "loss": 2.0, "loss/mlm": 1.5, "z_loss": 0.25, "lr": 0.1,
    "grad_norm": 1.0, "skipped": 0, "loss_scale": 65536.0, "samples": 12, "tokens": 96, "samples_hash": "ab",
    "tokens_per_s": 10.0, "mfu": None, "data_wait_s": 0.5, "memory_bytes": 1 << 30, "memory_rank": 1,
    "straggler_score": 4.0, "straggler_host": "n1",
}  # fmt: skip


def test_numbers_have_names_and_what_is_unknown_has_none() -> None:
    found = row_scalars(ROW)
    assert found["loss/train"] == 2.0
    assert found["loss/mlm"] == 1.5
    assert found["loss/z"] == 0.25
    assert found["optim/loss_scale"] == 65536.0
    assert found["memory/bytes"] == float(1 << 30)
    assert found["straggler/score"] == 4.0
    assert "speed/mfu" not in found
    assert not {"straggler/host", "samples_hash", "memory_rank"} & found.keys()


def test_each_source_of_a_blend_has_curves_of_its_own() -> None:
    sources = {"wiki": {"loss": 2.5, "labels": 32, "tokens": 64, "epochs": 0.25}, "rest": {"tokens": 32, "sources": 9}}
    found = row_scalars(ROW | {"sources": sources})
    assert {name: found[name] for name in found.keys() - row_scalars(ROW).keys()} == {
        "loss/train/wiki": 2.5, "tokens/wiki": 64.0, "epochs/wiki": 0.25, "tokens/rest": 32.0,
    }  # fmt: skip
    assert row_scalars(ROW | {"sources": {"wiki": {"loss": "2", "tokens": True}, "x": 3}}) == row_scalars(ROW)
    assert row_scalars(ROW | {"sources": [1]}) == row_scalars(ROW)


def test_rows_of_other_events() -> None:
    assert row_scalars({"event": "valid", "step": 3, "loss": 2.0, "ppl": 7.4}) == {"loss/valid": 2.0, "valid/ppl": 7.4}
    assert row_scalars({"event": "save", "step": 3, "saved_step": 2, "write_s": 1.0, "stall_s": 0.5, "bytes": 7}) == {
        "save/write_s": 1.0, "save/stall_s": 0.5,
    }  # fmt: skip
    assert row_scalars({"event": "start", "step": 0}) == {}


def test_every_name_is_on_a_page_and_in_the_documentation() -> None:
    page = (Path(__file__).parents[4] / "docs/how_to/read_a_run.md").read_text()
    patterns = [tag for charts in CHARTS.values() for tags in charts.values() for tag in tags]
    for name in (*_CURVES["step"].values(), *_CURVES["save"].values()):
        assert f"`{name}`" in page, name
        drawn = any(re.fullmatch(pattern, name) for pattern in patterns)
        assert drawn or name.startswith(("progress/", "optim/skipped")), name


def test_the_average_of_the_weights_is_drawn_beside_the_weights() -> None:
    row = {"event": "valid", "step": 3, "loss": 2.0, "ppl": 7.4, "ema": {"loss": 1.5, "ppl": 4.5}}
    charts = {
        name: [
            chart
            for page in CHARTS.values()
            for chart, tags in page.items() if any(re.fullmatch(tag, name) for tag in tags)
        ]
        for name in row_scalars(row)
    }  # fmt: skip
    assert charts["loss/ema"] == charts["loss/valid"] == ["train and validation"]
    assert charts["ema/ppl"] == charts["valid/ppl"] == ["validation"]
