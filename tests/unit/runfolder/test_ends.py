"""stop.json says why a run ended, and never hides it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtrain.cli.screen.print_messages_and_json import print_error
from lmtrain.errors import NonFiniteLossError, PeerLostError
from lmtrain.runfolder.file_names import STOP
from lmtrain.runfolder.read_and_record_run_end import (
    outcome_from_watchdog,
    read_last_stop,
    write_failure,
    write_process_failure,
    write_stop,
    write_unsaved_stop,
)
from lmtrain.runtime.files.atomic_files import folder_lock
from lmtrain.runtime.processes.local_rank_launcher import Outcome
from lmtrain.runtime.processes.process_environment import ProcessEnv


def test_a_stop_file_that_cannot_be_written_leaves_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / STOP).symlink_to(tmp_path / "precious")
    error = NonFiniteLossError("the loss is nan. Lower optim.lr.")
    write_failure(tmp_path, error, ProcessEnv())
    print_error(error)
    cause, then = capsys.readouterr().err.splitlines()
    assert cause == "error: the loss is nan. Lower optim.lr."
    assert then == f"The reason could not be written to stop.json: {tmp_path / STOP} is a symbolic link, and nothing " \
                   "is written through links. Remove the link."  # fmt: skip
    assert (tmp_path / "precious").read_text() == "mine"


def test_the_first_of_several_processes_says_why(tmp_path: Path) -> None:
    for rank in (1, 0):
        write_failure(tmp_path, NonFiniteLossError(f"rank {rank}"), ProcessEnv(rank=rank, world_size=2))
    facts = {"cause": "rank 1", "exit_code": 86, "requeue": False, "rank": 1, "resume": None}
    assert json.loads((tmp_path / STOP).read_text()) == facts
    assert write_stop(tmp_path / "none", "done", 0) is write_stop(tmp_path, "done", 0) is None
    assert not (tmp_path / "none").exists()
    facts = {"cause": "done", "exit_code": 0, "requeue": False, "resume": None}
    assert json.loads((tmp_path / STOP).read_text()) == facts


def test_the_next_start_is_told_briefly(tmp_path: Path) -> None:
    assert read_last_stop(tmp_path) == {}
    write_failure(tmp_path, PeerLostError("gone " * 100, rank=3), ProcessEnv(world_size=4))
    told = read_last_stop(tmp_path)
    assert told | {"cause": told["cause"][:5]} == {"cause": "gone ", "exit_code": 76, "rank": 3, "lost": 3}
    assert len(told["cause"]) < 310
    for damaged in ('{"cause": ', "[]"):
        (tmp_path / STOP).write_text(damaged)
        assert read_last_stop(tmp_path) == {}


def test_a_run_that_is_cut_off_names_its_checkpoint_and_leaves_a_folder_in_use_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_00000007").mkdir(parents=True)
    with folder_lock(tmp_path):
        assert "is in use by" in str(write_unsaved_stop(tmp_path, "SIGUSR1"))
        assert not (tmp_path / STOP).exists()
    assert write_unsaved_stop(tmp_path, "SIGUSR1") is None
    newest = str(tmp_path / "checkpoints/step_00000007")
    facts = {"cause": "SIGUSR1", "step": 7, "exit_code": 75, "requeue": True, "resume": newest}
    assert json.loads((tmp_path / STOP).read_text()) == facts


def test_the_launcher_leaves_what_the_watch_has_said(tmp_path: Path) -> None:
    outcome = Outcome(76, rank=0, cause="rank 0 failed")
    assert outcome_from_watchdog(tmp_path, outcome, None) is None
    write_failure(tmp_path, PeerLostError("rank 3 hangs", rank=3, stacks="hangs/a"), ProcessEnv(world_size=4))
    said = outcome_from_watchdog(tmp_path, outcome, None)
    assert said is not None
    assert (said.rank, said.cause) == (3, "rank 3 hangs")
    write_process_failure(tmp_path, outcome)  # which no watch has written
    assert outcome_from_watchdog(tmp_path, outcome, None) is None
