"""Rows as they come: whole ones, each once, whatever becomes of the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lmtrain.runfolder.metrics_rows import RowFollower


def line(step: int, **values: Any) -> str:
    return json.dumps({"event": "step", "step": step, "attempt": 1, **values}) + "\n"


def steps(followed: RowFollower) -> list[int]:
    return [row["step"] for row in followed.rows()]


def test_each_row_comes_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    followed = RowFollower(path)
    assert steps(followed) == []
    path.write_text(line(1) + line(2) + line(3)[:20])
    assert (steps(followed), steps(followed)) == ([1, 2], [])
    path.write_text(line(1) + line(2) + line(3) + line(4))
    assert steps(followed) == [3, 4]


def test_damaged_lines_tell_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{\n[]\n" + '{"event": 1, "step": 2}\n' + line(5, loss="nan") + "\n" + '{"event": "step"}\n')
    (row,) = RowFollower(path).rows()
    assert row["step"] == 5
    assert math.isnan(row["loss"])


def test_a_file_that_became_shorter_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    followed = RowFollower(path)
    assert steps(followed) == [1, 2]
    path.write_text(line(7))
    assert steps(followed) == [7]


def test_of_a_long_file_the_newest_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(line, range(100))))
    followed = RowFollower(path, 5 * len(line(99)) + 3)
    assert steps(followed) == [95, 96, 97, 98, 99]
