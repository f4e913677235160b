"""A record as columns: what counts after restarts, what a kill or a hand has damaged, and numbers at any step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.observe.history.read_metrics_columns import read_record
from lmtrain.observe.metrics import read_metrics


def row(event: str, step: int, attempt: int = 1, **values: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "attempt": attempt} | values


def written(folder: Path, *rows: dict[str, Any] | str) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in rows))
    return path


def test_the_kind_of_a_row_is_a_text_whatever_it_says(tmp_path: Path) -> None:
    record = read_record(written(tmp_path, row("start", 0), row("step", 1, loss=2.0), row("nan", 1), row("inf", 1)))
    assert record.rows.keys() == {"start", "nan", "inf"}


def test_what_counts_is_what_read_metrics_says(tmp_path: Path) -> None:
    path = written(
        tmp_path, row("start", 0), *(row("step", step, loss=9.0 - step, elapsed_s=step) for step in range(1, 8)),
        row("save", 4, saved_step=4), row("valid", 6, loss=5.0), row("start", 4, 2),
        *(row("step", step, 2, loss=step / 7, elapsed_s=step - 4) for step in range(5, 7)), row("stop", 6, 2),
    )  # fmt: skip
    record = read_record(path)
    steps = [one for one in read_metrics(path) if one["event"] == "step"]
    assert record.columns["loss"].tolist() == [one["loss"] for one in steps]
    assert record.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert record.columns["seconds"].tolist() == [1, 2, 3, 4, 8, 9]  # because: the lost steps took their time
    assert record.rewinds == [(4, 7)]
    assert "valid" not in record.rows
    assert [one["step"] for one in record.rows["start"]] == [0, 4]
    assert record.problems == []


def test_sources_are_columns_of_their_own(tmp_path: Path) -> None:
    sources = [{"wiki": {"loss": 2.5, "tokens": 64}}, {"wiki": {"tokens": 96}, "code": {"loss": 3.0, "tokens": 8}}]
    record = read_record(written(tmp_path, *(row("step", i + 1, loss=2.0, sources=s) for i, s in enumerate(sources))))
    assert record.column("loss/train/wiki")[1].tolist() == [2.5]
    assert record.column("tokens/wiki")[1].tolist() == [64, 96]
    assert [values.tolist() for values in record.column("loss/train/code")] == [[2], [3.0]]


def test_a_later_start_undoes_what_an_earlier_one_had_left(tmp_path: Path) -> None:
    record = read_record(written(
        tmp_path, row("start", 0), row("valid", 2, loss=9.0), row("valid", 6, loss=8.0), row("start", 8, 2),
        row("valid", 10, 2, loss=7.0), row("start", 4, 3), row("valid", 5, 3, loss=6.0),
    ))  # fmt: skip
    assert [one["loss"] for one in record.rows["valid"]] == [9.0, 6.0]


@pytest.mark.parametrize("numbers", [(1, 2, 2), (1, 2, 3)])
def test_every_start_takes_its_time(numbers: tuple[int, int, int], tmp_path: Path) -> None:
    """Two of three went on from step 10; in older runs they have one number."""
    rows = []
    for number, begin, end in zip(numbers, (0, 10, 10), (15, 18, 12), strict=True):
        rows.append(row("start", begin, number))
        rows += [row("step", step, number, elapsed_s=step - begin) for step in range(begin + 1, end + 1)]
    record = read_record(written(tmp_path, *rows))
    assert record.columns["seconds"].tolist() == [*range(1, 11), 15 + 8 + 1, 15 + 8 + 2]


def test_damage_is_left_out_and_said(tmp_path: Path) -> None:
    path = written(
        tmp_path, row("start", 0), row("step", 1, loss=2.0), "not json\n", '{"event": "step"}\n', '["a list"]\n',
        row("step", 2, loss="nan", grad_norm="inf"), row("step", True), row("step", -3), row("step", 10**400),
        row("step", 3, loss={"a": 1}, text="words"), row("step", 4, loss=1.5), '{"event": "step", "step": 5, "lo',
    )  # fmt: skip
    record = read_record(path)
    assert record.steps.tolist() == [1, 2, 3, 4]
    places, values = record.column("loss")
    assert (places.tolist(), values.tolist()) == ([1, 4], [2.0, 1.5])
    assert [(step, key) for step, key, _ in record.non_finite] == [(2, "loss"), (2, "grad_norm")]
    assert record.problems == [
        "metrics.jsonl: line 3, 5 more of 12 are no rows and are left out",
        "metrics.jsonl: its last line is incomplete: the run was killed, or is writing it now",
    ]


def test_no_file_and_no_row(tmp_path: Path) -> None:
    assert "is not there" in read_record(tmp_path / "metrics.jsonl").problems[0]
    record = read_record(written(tmp_path, row("start", 0)))
    assert record.problems == ["metrics.jsonl has no row of a step yet"]
    assert math.isnan(record.interpolate("tokens", np.array([3.0]))[0])


def test_numbers_between_rows(tmp_path: Path) -> None:
    rows = [row("step", step, tokens=step * 100) for step in (10, 20)]
    record = read_record(written(tmp_path, *rows))
    assert record.interpolate("tokens", np.array([0.0, 5.0, 15.0, 20.0])).tolist() == [0, 500, 1500, 2000]


def test_a_branch_begins_with_its_parents_tokens_and_no_time(tmp_path: Path) -> None:
    rows = [row("step", step, tokens=step * 100, elapsed_s=float(step)) for step in (10, 20)]
    record = read_record(written(tmp_path, row("start", 8, tokens=400), *rows))
    assert record.interpolate("tokens", np.array([8.0, 9.0, 10.0])).tolist() == [400, 700, 1000]
    assert record.interpolate("seconds", np.array([8.0])).tolist() == [0]
