"""The numbers of a run: steps, validations and evaluations in one set of arrays, and restarts as reports read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmtrain
from lmtrain.errors import MissingInputError, UsageError

NAN = float("nan")


def write(run: Path, *rows: dict[str, Any]) -> lmtrain.Metrics:
    run.mkdir(exist_ok=True)
    lines = [json.dumps({"attempt": 1} | row) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    return lmtrain.metrics(run)


def step(number: int, loss: float | str, **more: float) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": loss, **more}


def test_every_array_has_an_entry_for_every_step(tmp_path: Path) -> None:
    metrics = write(
        tmp_path,
        {"event": "start", "step": 0},
        step(10, 5.0),
        step(20, "nan", grad_norm=1.5),
        {"event": "valid", "step": 20, "loss": 4.5, "ppl": 90.0},
        {"event": "eval", "step": 25, "name": "wiki", "measures": {"word_perplexity": 30.0}},
    )
    expected = {
        "loss": [5.0, NAN, NAN], "grad_norm": [NAN, 1.5, NAN], "loss/valid": [NAN, 4.5, NAN],
        "valid/ppl": [NAN, 90.0, NAN], "eval/wiki/word_perplexity": [NAN, NAN, 30.0],
    }  # fmt: skip
    assert metrics["step"].tolist() == [10, 20, 25]
    assert metrics["step"].dtype == np.int64
    for name, values in expected.items():
        np.testing.assert_array_equal(metrics[name], values)
    assert set(metrics) == {"step", "seconds", "attempt", *expected}
    assert len(metrics) == len(list(metrics))
    assert metrics.problems == []


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    metrics = write(
        tmp_path,
        {"event": "start", "step": 0}, step(1, 5.0), step(2, 4.0), {"event": "valid", "step": 2, "loss": 9.0},
        {"event": "start", "step": 1, "attempt": 2}, step(2, 3.5, attempt=2),
    )  # fmt: skip
    assert metrics["loss"].tolist() == [5.0, 3.5]
    assert "loss/valid" not in metrics
    assert metrics["attempt"].tolist() == [1, 2]


def test_a_damaged_record_is_read_and_its_damage_named(tmp_path: Path) -> None:
    write(tmp_path, step(1, 5.0))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "st')
    metrics = lmtrain.metrics(tmp_path)
    assert metrics["loss"].tolist() == [5.0]
    assert len(metrics.problems) == 1
    assert "last line is incomplete" in metrics.problems[0]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    metrics = write(tmp_path / "run", step(1, 5.0))
    with pytest.raises(KeyError, match=r"has recorded no los. Did you mean loss\?"):
        metrics["los"]
    assert metrics.get("los") is None
    with pytest.raises(MissingInputError, match="Give the folder of a run"):
        lmtrain.metrics(tmp_path)


def test_a_notebook_shows_what_they_are(tmp_path: Path) -> None:
    told = [repr(write(tmp_path / "a", *(step(number, 5.0) for number in numbers))) for numbers in ((), (10, 2000))]
    assert told[0] == f"<lmtrain.Metrics {tmp_path / 'a'}: 0 steps; step, seconds>"
    assert told[1] == f"<lmtrain.Metrics {tmp_path / 'a'}: 2 steps up to step 2,000; step, attempt, loss, seconds>"


def test_a_run_without_steps_has_empty_arrays(tmp_path: Path) -> None:
    assert write(tmp_path, {"event": "start", "step": 0})["step"].tolist() == []


def test_pandas_gets_a_row_for_each_step(tmp_path: Path) -> None:
    frame = pytest.importorskip("pandas", reason="pandas is not installed")
    metrics = write(tmp_path, step(10, 5.0), {"event": "valid", "step": 10, "loss": 4.5}, step(20, 4.0))
    assert isinstance(metrics.to_pandas(), frame.DataFrame)
    assert metrics.to_pandas().set_index("step")["loss/valid"][10] == 4.5


def test_without_pandas_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"needs pandas.*`pip install pandas`"):
        write(tmp_path, step(1, 5.0)).to_pandas()
