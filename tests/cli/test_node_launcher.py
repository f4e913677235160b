"""What stop.json says where several nodes write it, as nodes of Slurm do: the first reason stays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmtrain.cli.screen.print_messages_and_json import print_error
from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import AlreadyReported, StoppedEarly
from lmtrain.runfolder.file_names import STOP
from lmtrain.runtime.processes.local_rank_launcher import Outcome
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.stop_signals import Stopped
from lmtrain.start.processes_of_command import launch_training
from lmtrain.start.run_attempt_bookkeeping import run_attempt
from lmtrain.train.run_config import RunConfig

RANK_0 = ProcessEnv(0, 4, 0, "slurm", "n1", is_child=True)
SECOND_NODE = ProcessEnv(2, 4, 0, "slurm", "n2", local_world_size=2, num_ranks=2)
KILLED = Outcome(76, 3, "rank 3 on n2 was ended by SIGKILL, and the run with it.", signal=9)
OTHERS = {"cause": "the disk of n1 is full", "exit_code": 74}
EARLIER = {"cause": "done", "exit_code": 0}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = compose(RunConfig, ["data.path=x"])
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(tmp_path)))


def write(folder: Path, facts: dict[str, Any]) -> None:
    (folder / STOP).write_text(json.dumps(facts))


def cause(folder: Path) -> Any:
    return json.loads((folder / STOP).read_text())["cause"]


@pytest.mark.parametrize(
    ("before", "meanwhile", "then"),
    [(None, None, KILLED.cause), (EARLIER, None, KILLED.cause), (EARLIER, OTHERS, OTHERS["cause"])],
)
def test_another_nodes_launcher_writes_what_nobody_has_written(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Any, meanwhile: Any, then: str
) -> None:
    def launch(*_: object, **__: object) -> Outcome:
        if meanwhile is not None:
            write(tmp_path, meanwhile)
        return KILLED

    monkeypatch.setattr("lmtrain.start.launch_ranks.launch", launch)
    # because: this process goes on
    monkeypatch.setattr("lmtrain.start.launch_ranks.ignore_stops", lambda: None)
    if before is not None:
        write(tmp_path, before)
    inputs: Any = SimpleNamespace(resume_from=None, tokenizer=SimpleNamespace(source="t"))
    with pytest.raises(AlreadyReported) as end:
        launch_training(["pretrain"], config, inputs, SECOND_NODE, None, None, "m:f", print)
    assert end.value.exit_code == 137
    assert cause(tmp_path) == then


def stop_in_start(config: RunConfig, meanwhile: Callable[[], None]) -> None:
    """End as rank 0 that is asked to stop before it has met its peers."""
    with run_attempt(RANK_0, print_error, print) as this:
        this.accept_settings(config)
        meanwhile()
        raise Stopped("SIGTERM")


def leave_with_peer(config: RunConfig, meanwhile: Callable[[], None]) -> None:
    """End as rank 0 that is told of a peer which was asked to stop."""
    inputs: Any = SimpleNamespace(resume_from=None)
    with suppress(StoppedEarly), run_attempt(RANK_0, print_error, print) as this:
        this.accept_settings(config)
        this.count_start(inputs)
        this.stop.defer()
        meanwhile()
        raise StoppedEarly("No process starts, because rank 2 on n2 was asked to stop: SIGTERM")


@pytest.mark.parametrize("end", [stop_in_start, leave_with_peer])
@pytest.mark.parametrize("is_written", [True, False])
def test_rank_0_that_is_asked_to_stop_leaves_the_reason_of_another_node(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any, is_written: bool
) -> None:
    """srun asks all tasks to stop once one of them has failed."""
    for name in ("end_now", "ignore_stops"):
        monkeypatch.setattr(f"lmtrain.start.run_attempt_bookkeeping.{name}", lambda *_: None)
    monkeypatch.setattr("lmtrain.train.in_loop.failed_start_counter.count_start", lambda *_: None)
    write(tmp_path, EARLIER)
    end(config, lambda: write(tmp_path, OTHERS) if is_written else None)
    assert (cause(tmp_path) == OTHERS["cause"]) == is_written
    assert cause(tmp_path) != EARLIER["cause"]
