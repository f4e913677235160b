"""metrics.jsonl keeps exact numbers, and tells one story of several attempts."""

from __future__ import annotations

import math
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.errors import DataError, MissingInputError
from lmtrain.observe.history.read_metrics_columns import read_record
from lmtrain.observe.metrics import MetricsLog
from lmtrain.runfolder.metrics_rows import ROW_BYTES, read_last_rows, read_lines, read_metrics


def _row(event: str, step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "attempt": attempt, **more}


def _write(path: Path, *rows: dict[str, Any]) -> None:
    with closing(MetricsLog(path)) as log:
        for row in rows:
            log.append(row)


@given(value=st.floats(allow_nan=False))
def test_floats_round_trip_exactly(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    _write(path, _row("step", 1, loss=value))
    back = read_metrics(path)[0]["loss"]
    assert back == value
    assert math.copysign(1, back) == math.copysign(1, value)


def test_non_finite_numbers_are_strings_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, _row("step", 1, loss=math.nan, grad_norm=math.inf, parts=[-math.inf]))
    assert '"loss": "nan"' in path.read_text()
    row = read_metrics(path)[0]
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["parts"]) == (math.inf, [-math.inf])


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}\n{"event": "st\n{"event": "step", "step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


@pytest.mark.parametrize("more", [-1, 0, 1, 2, ROW_BYTES, ROW_BYTES + 1, 2 * ROW_BYTES + 7])
def test_of_a_line_that_is_too_long_the_rest_is_skipped(tmp_path: Path, more: int) -> None:
    (tmp_path / "m").write_bytes(b"x" * (ROW_BYTES + more) + b"\nlast\n")
    first, *rest = read_lines(tmp_path / "m")
    assert (len(first), rest) == (ROW_BYTES + min(more + 1, 1), [b"last\n"])


def test_a_file_of_nothing_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}\n')
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is longer than 1 MiB"):
        read_metrics(path)


def test_a_missing_file_is_a_missing_input(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="does not exist"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_the_last_attempt_wins_and_what_it_undid_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(
        path,
        _row("start", 0),
        *(_row("step", step, loss=1.0) for step in range(1, 6)),
        _row("valid", 4, loss=9.0),
        _row("start", 2, attempt=2),
        *(_row("step", step, attempt=2, loss=0.5) for step in range(3, 5)),
    )
    kept = [(row["event"], row["step"], row["attempt"]) for row in read_metrics(path)]
    assert kept == [
        ("start", 0, 1), ("step", 1, 1), ("step", 2, 1), ("start", 2, 2), ("step", 3, 2), ("step", 4, 2)
    ]  # fmt: skip


def test_the_save_that_a_run_went_on_from_is_not_gone(tmp_path: Path) -> None:
    """A run tells of it a step later or more; what was saved beyond it is gone."""
    path = tmp_path / "metrics.jsonl"
    _write(
        path, _row("start", 0), *(_row("save", saved + 1, saved_step=saved) for saved in (2, 4, 6)),
        _row("start", 4, attempt=2), _row("save", 8, saved_step=6, attempt=2),
    )  # fmt: skip
    saves = [row for row in read_metrics(path) if row["event"] == "save"]
    assert [(row["step"], row["saved_step"]) for row in saves] == [(3, 2), (5, 4), (8, 6)]
    assert read_record(path).rows["save"] == saves


def test_of_two_rows_with_one_step_the_last_stands(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, _row("valid", 4, loss=2.0), _row("step", 4, loss=3.0), _row("valid", 4, loss=1.0))
    assert [(row["event"], row["loss"]) for row in read_metrics(path)] == [("step", 3.0), ("valid", 1.0)]


def test_evaluations_of_one_step_are_told_apart_by_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [_row("eval", 4, name=name, nll_sum_nats=value) for name, value in (("a", 1.0), ("b", 2.0), ("a", 3.0))]
    _write(path, *rows)
    assert [(row["name"], row["nll_sum_nats"]) for row in read_metrics(path)] == [("b", 2.0), ("a", 3.0)]


def test_the_newest_rows_are_read_past_what_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_last_rows(path) == []
    path.write_text("".join(f'{{"event": "step", "step": {step}, "loss": "inf"}}\n' for step in range(20_000)) + "{\n")
    rows = read_last_rows(path)
    assert 1000 < len(rows) < 20_000
    assert rows[-1] == {"event": "step", "step": 19_999, "loss": math.inf}
