"""metrics.jsonl holds whole rows alone, and each at once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import MetricsLog, read_metrics


def _row(event: str, step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "attempt": attempt, **more}


def _write(path: Path, *rows: dict[str, Any]) -> None:
    with closing(MetricsLog(path)) as log:
        for row in rows:
            log.append(row)


def test_a_row_is_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(_row("step", 1))
    assert read_metrics(path) == [_row("step", 1)]
    log.close()


@pytest.mark.parametrize("row", [{"event": "step", "step": 1}, {"step": 1, "attempt": 1}, _row("lunch", 1)])
def test_an_incomplete_row_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with closing(MetricsLog(tmp_path / "metrics.jsonl")) as log, pytest.raises(ValueError, match="must have a step"):
        log.append(row)


def test_every_torn_tail_is_tolerated_and_cut_away_on_append(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [_row("step", 1, loss=2.5), _row("step", 2, loss=2.25)]
    _write(path, *rows)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        kept = read_metrics(path)
        assert kept in ([rows[0]], rows)  # a last line that lacks only its line end is still whole
        _write(path, _row("step", 3))
        assert read_metrics(path) == [rows[0], _row("step", 3)]
