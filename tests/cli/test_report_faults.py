"""What had ended an earlier start of a run stays in its record, and is a fault in the report."""

from __future__ import annotations

import json
from pathlib import Path

from lmtrain.cli.report.draw_curves import build_charts
from lmtrain.observe.history.read_metrics_columns import read_record
from tests.cli.harness import Toy, lmtrain
from tests.cli.test_report import figures


def test_faults_that_a_run_survived(toy: Toy, tmp_path: Path) -> None:
    run, short = tmp_path / "run", {"train__steps": 3, "checkpoint__interval_steps": "null"}
    lmtrain("pretrain", *toy.settings(run, **short, optim__lr="1e30", optim__clip_norm="null"), code=86)
    lmtrain("pretrain", *toy.settings(run, **short))
    lmtrain("pretrain", *toy.settings(run, **short))
    (run / "stop.json").unlink()  # as a kill leaves it
    lmtrain("pretrain", *toy.settings(run, **short))
    starts = read_record(run / "metrics.jsonl").rows["start"]
    assert "before" not in starts[0]
    failed, ended, killed = (one["before"] for one in starts[1:])
    assert (failed["exit_code"], failed["cause"][:11]) == (86, "The loss of")
    assert (ended, killed) == ({"cause": "done", "exit_code": 0}, {})
    lmtrain("report", run)
    marks = [(kind, said) for _, kind, _, _, _, said in figures(run / "report.html")["marks"] if kind != "save"]
    assert [kind for kind, _ in marks] == ["restart", "fault", "restart", "restart", "fault"]
    assert marks[1][1].startswith("the start before failed with exit code 86: The loss of")
    assert marks[4][1] == "the start before was killed or crashed: it left no stop.json"


def test_a_stop_stands_before_the_start_that_went_on_from_there(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"event": "start", "step": step, "attempt": 1 + step // 4} for step in (0, 4)]
    rows.insert(1, {"event": "step", "step": 4, "loss": 2.0})
    rows.insert(2, {"event": "stop", "step": 4, "stopped_by": "SIGINT"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = build_charts(["run"], [read_record(tmp_path / "metrics.jsonl")], [None])
    assert [mark.kind for mark in found.marks] == ["stop", "restart"]
