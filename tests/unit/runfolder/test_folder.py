"""What a run's folder shows, whatever state it is in."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lmtrain.errors import DataError, MissingInputError
from lmtrain.runfolder import folder_reader as module
from lmtrain.runfolder.file_names import CHECKPOINTS, CONFIG, ENVIRONMENT, FAILED_STARTS, METRICS, STOP
from lmtrain.runfolder.folder_reader import (
    expand_runs,
    find_runs,
    is_run,
    not_a_run,
    read_runs,
    record_errors,
    run_around,
    run_state,
)
from lmtrain.runfolder.read_and_record_run_end import stop_stamp
from lmtrain.runtime.files.atomic_files import folder_lock
from lmtrain.runtime.processes.process_environment import process_identity


def a_run(path: Path) -> Path:
    path.mkdir(parents=True)
    for name, text in ((METRICS, ""), (CONFIG, '{"train": {"steps": 3}}'), (ENVIRONMENT, "{}")):
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize(
    ("cause", "exit_code", "state"),
    [("done", 0, "finished"), ("SIGTERM", 75, "stopped"), ("the file STOP", 79, "stopped"), ("lost", 76, "failed")],
)
def test_the_state_of_a_run_that_said_how_it_ended(tmp_path: Path, cause: str, exit_code: int, state: str) -> None:
    assert run_state(tmp_path, {"cause": cause, "exit_code": exit_code}) == {"state": state, "process": None}


def test_the_state_of_a_run_that_said_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_state(tmp_path, None) == {"state": "killed", "process": None}
    with folder_lock(tmp_path):
        assert run_state(tmp_path, None)["state"] == "running"
    assert run_state(tmp_path, None)["state"] == "killed"
    other = f"process 7 on other-{socket.gethostname()}"  # which ends as this machine's name does
    monkeypatch.setattr(module, "lock_holder", lambda path: (other, False))
    assert run_state(tmp_path, None) == {"state": "out of sight", "process": other}


def test_a_run_that_starts_again_is_not_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(stop: dict[str, Any] | None = None, **newest: Any) -> str:
        entry = {"host": socket.gethostname(), "command": process_identity(os.getpid())} | newest
        (tmp_path / FAILED_STARTS).write_text(json.dumps({"lost": [entry]}))
        return str(run_state(tmp_path, stop)["state"])

    assert state() == state({"cause": "SIGTERM", "exit_code": 75}) == "running"
    assert state({"cause": "done", "exit_code": 0}) == "finished"
    assert state(command=f"{os.getpid()}.1") == "killed"  # another process had the number
    # a launcher restarts the run after a loss; a process without one has ended with it
    lost = {"cause": "rank 1 was killed", "exit_code": 76}
    assert state(lost, how="rank 1 was killed", is_launched=True) == "running"
    assert state(lost, how="rank 1 was killed", is_launched=False) == "failed"
    # a job that was requeued, on another machine
    (tmp_path / STOP).write_text("{}")
    now, stopped = datetime.now(UTC), {"cause": "SIGTERM", "exit_code": 75}
    other = {"host": "other", "began": now.isoformat(), "stop_before": stop_stamp(tmp_path)}
    assert state(stopped, **other) == "out of sight"
    assert run_state(tmp_path, stopped)["process"] == f"process {os.getpid()} on other, which starts the run"
    for began in (None, "yesterday", 7):
        assert state(stopped, **other | {"began": began}) == "stopped"
    assert state(stopped, **other | {"began": (now - timedelta(hours=1)).isoformat()}) == "stopped"
    assert state(stopped, **other | {"stop_before": None}) == "stopped"


def test_runs_are_found_below_a_folder_and_below_a_run(tmp_path: Path) -> None:
    for name in ("b", "a/c", "a/c/inner", "a/c/checkpoints/step_00000001", "x/x/x/x/deep", ".hidden"):
        a_run(tmp_path / name)
    assert list(find_runs(tmp_path)) == [tmp_path / "a/c", tmp_path / "a/c/inner", tmp_path / "b"]
    assert expand_runs([tmp_path / "a/c"]) == [tmp_path / "a/c"]  # the run that was named, and none below it
    assert expand_runs([tmp_path / "b", tmp_path, tmp_path / "none"]) == [
        tmp_path / "b", tmp_path / "a/c", tmp_path / "a/c/inner", tmp_path / "none",
    ]  # fmt: skip
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / CONFIG).write_text("{}")
    assert not is_run(tmp_path / "hf")  # because: others call a file so, too
    (tmp_path / "hf" / CHECKPOINTS).mkdir()
    assert is_run(tmp_path / "hf")


def test_a_path_where_a_run_is_needed(tmp_path: Path) -> None:
    for name in ("runs/base/checkpoints/step_00000004", "runs/none"):
        (tmp_path / name).mkdir(parents=True)
    base = tmp_path / "runs" / "base"
    (base / "metrics.jsonl").touch()
    checkpoint = base / "checkpoints" / "step_00000004"
    assert run_around(checkpoint) == base
    assert (run_around(base), run_around(tmp_path / "runs")) == (None, None)
    lies = MissingInputError(not_a_run(checkpoint, "it has no files"))
    assert str(lies) == f"{checkpoint} lies in a run, and the run itself is needed. Use {base}."
    assert lies.ways[0][0][:2] == ((str(base),), (str(checkpoint),))
    assert f"runs/bsae does not exist. Did you mean {base}?" in str(
        MissingInputError(not_a_run(tmp_path / "runs/bsae", "it has no files"))
    )
    none = tmp_path / "runs" / "none"
    assert not_a_run(none, "it has no files") == (
        f"{none} is not the folder of a run: it has no files. Give the run.dir of a run."
    )


def test_a_run_that_is_named_by_dots_has_the_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "first" / "run")
    a_run(tmp_path / "second" / "run")
    monkeypatch.chdir(run)
    assert [run.name for run in read_runs([Path("."), Path("../../second/run")])] == ["first/run", "second/run"]


def test_what_is_not_there_or_damaged_is_said(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one" / "run")
    (run / ENVIRONMENT).unlink()
    (run / STOP).write_text("[]")
    one, two = read_runs([run, a_run(tmp_path / "two" / "run")])
    assert (one.name, two.name) == ("one/run", "two/run")
    assert one.problems == [
        f"{ENVIRONMENT} is not there: versions and machine are not known",
        f"{STOP} holds no object of JSON: why it stopped is not known",
    ]
    assert (one.settings, one.stop, one.end_reason) == ({"train": {"steps": 3}}, None, f"left no {STOP}")
    assert two.problems == []


def test_records_that_no_run_writes_are_refused_by_the_folder(tmp_path: Path) -> None:
    row: dict[str, float] = {}
    message = r"has unexpected content \(KeyError: 'loss'\)"
    with pytest.raises(DataError, match=message), record_errors(tmp_path):
        row["loss"]
