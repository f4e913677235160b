"""Whatever asks a run to stop or to save, at any moment: exit code 75, stop.json, and the same losses in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lmtrain.cli.screen.print_messages_and_json import print_error
from lmtrain.errors import StoppedEarly
from lmtrain.observe.metrics import read_metrics
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.stop_signals import Stopped
from lmtrain.start.run_attempt_bookkeeping import run_attempt
from lmtrain.train.in_loop import save_and_stop_requests
from lmtrain.train.in_loop.save_and_stop_requests import Allocation
from tests.cli.harness import Toy, lmtrain, start
from tests.marks import slow, wide

SIGNALS = ("term", "usr1", "usr2", "int")
NAMES = {name: f"SIG{name.upper()}" for name in SIGNALS}
EARLY = ("start.imports", "start.rendezvous", "start.folder", "start.build", "start.loop", "data.next", "forward",
         "backward", "opt_step")  # fmt: skip


def faulty(what: str) -> dict[str, str]:
    return {"LMTRAIN_FAULT": what, "LMTRAIN_ALLOW_FAULTS": "1"}


def stop_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "stop.json").read_text())
    return found


def trained(folder: Path) -> list[tuple[Any, ...]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]
    return [(row["step"], row["loss"], row["grad_norm"], row["samples_hash"]) for row in rows]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def unbroken(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    lmtrain("pretrain", *toy.settings(folder))
    return trained(folder)


@pytest.mark.wide
@pytest.mark.parametrize(("action", "point"), [("int", "start.build")])
def test_a_signal_before_the_first_step_ends_the_run_with_75(
    toy: Toy, tmp_path: Path, unbroken: list[tuple[Any, ...]], action: str, point: str
) -> None:
    folder = tmp_path / "run"
    said = lmtrain("pretrain", *toy.settings(folder), code=75, env=faulty(f"{action}:point={point}"))
    assert f"{NAMES[action]}: nothing is saved. The same command begins anew" in said
    facts = {"cause": NAMES[action], "step": 0, "exit_code": 75, "requeue": True, "resume": None}
    assert stop_of(folder) == facts
    lmtrain("pretrain", *toy.settings(folder))
    assert trained(folder) == unbroken


@pytest.mark.parametrize("point", ["start.load", *wide("start.imports", "data.next", "opt_step")])
def test_a_signal_before_the_first_step_of_a_later_start_names_the_checkpoint(
    toy: Toy, tmp_path: Path, unbroken: list[tuple[Any, ...]], point: str
) -> None:
    folder = tmp_path / "run"
    lmtrain("pretrain", *toy.settings(folder), code=75, env=faulty("usr1:point=step:step=4"))
    said = lmtrain("pretrain", *toy.settings(folder), code=75, env=faulty(f"term:point={point}"))
    newest = str(folder / "checkpoints/step_00000005")
    assert f"SIGTERM: a checkpoint is saved, {newest}. Run the same command again to go on." in said
    assert stop_of(folder) == {"cause": "SIGTERM", "step": 5, "exit_code": 75, "requeue": True, "resume": newest}
    lmtrain("pretrain", *toy.settings(folder))
    assert trained(folder) == unbroken


# because: what a signal is called makes no difference to when it is heard
EACH_ONCE = [(SIGNALS[number % len(SIGNALS)], point) for number, point in enumerate(EARLY)]
THE_REST = [one for one in product(SIGNALS, EARLY) if one not in EACH_ONCE]


@pytest.mark.parametrize(("action", "point"), [*wide(*EACH_ONCE), *slow(*THE_REST)])
def test_every_signal_at_every_moment_of_a_start(toy: Toy, tmp_path: Path, action: str, point: str) -> None:
    folder = tmp_path / "run"
    lmtrain("pretrain", *toy.settings(folder), code=75, env=faulty(f"{action}:point={point}"))
    assert stop_of(folder)["cause"] == NAMES[action]
    assert stop_of(folder)["resume"] is None


def test_who_insists_before_the_settings_are_read_gets_words() -> None:
    message = "SIGUSR1: the settings were not read yet"
    with pytest.raises(StoppedEarly, match=message), run_attempt(ProcessEnv(), print_error, print) as this:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGUSR1)
        assert this.stop.requested == "SIGUSR1"
        raise Stopped("SIGUSR1")


@pytest.mark.wide
def test_a_signal_amid_a_save_lets_it_end(toy: Toy, tmp_path: Path, unbroken: list[tuple[Any, ...]]) -> None:
    folder = tmp_path / "run"
    lmtrain("pretrain", *toy.settings(folder), code=75, env=faulty("usr2:point=ckpt.mid_write"))
    assert stop_of(folder)["resume"] == str(folder / f"checkpoints/{checkpoints(folder)[-1]}")
    assert "step_00000004" in checkpoints(folder)
    lmtrain("pretrain", *toy.settings(folder))
    assert trained(folder) == unbroken


def validations(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "valid"]


@pytest.mark.wide
def test_a_validation_that_is_cut_off_is_made_up_for(toy: Toy, tmp_path: Path) -> None:
    changed = {"train__valid_interval_steps": 6, "train__valid_samples": 8}
    lmtrain("pretrain", *toy.settings(tmp_path / "whole", **changed))
    for count, at in ((2, 6), (6, 12)):  # of four batches each
        folder = tmp_path / f"cut at {at}"
        typed = toy.settings(folder, **changed)
        said = lmtrain("pretrain", *typed, code=75, env=faulty(f"term:point=valid.batch:count={count}"))
        assert f"validation of step {at}: left to the next start" in said
        assert [step for step, _ in validations(folder)] == [6][: at // 6 - 1]
        assert (stop_of(folder)["step"], stop_of(folder)["requeue"]) == (at, True)
        lmtrain("pretrain", *typed)
        assert validations(folder) == validations(tmp_path / "whole")
        assert trained(folder) == trained(tmp_path / "whole")
        assert stop_of(folder)["cause"] == "done"
        assert "valid at step" not in lmtrain("pretrain", *typed)


def test_a_time_limit_stops_a_run_that_goes_on_as_if_it_had_not(
    toy: Toy, tmp_path: Path, unbroken: list[tuple[Any, ...]]
) -> None:
    folder = tmp_path / "run"
    said = lmtrain("pretrain", *toy.settings(folder, run__time_limit="0.001s"), code=75)
    assert "run.time_limit=0.0s: stopping after this step" in said
    newest = str(folder / "checkpoints/step_00000001")
    facts = {"cause": "run.time_limit=0.0s", "step": 1, "exit_code": 75, "requeue": True, "resume": newest}
    assert stop_of(folder) == facts
    lmtrain("pretrain", *toy.settings(folder, data__path=tmp_path / "moved"), code=66)
    assert stop_of(folder) == facts  # a start that is refused leaves what is there
    lmtrain("pretrain", *toy.settings(folder, run__time_limit="1d"))
    assert trained(folder) == unbroken


@pytest.mark.wide
def test_the_end_of_an_allocation_needs_no_signal(toy: Toy, tmp_path: Path) -> None:
    """A job that ends in the next moment, by a clock that says so."""
    folder = tmp_path / "run"
    env = {"SLURM_JOB_ID": "1", "SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1001", "PATH": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_and_stop_requests, "Allocation", partial(Allocation, wall_clock=lambda: 1000.999))
        lmtrain("pretrain", *toy.settings(folder), code=75, env=env)
    assert (stop_of(folder)["cause"], stop_of(folder)["step"]) == ("the end of the allocation", 1)


def test_a_file_saves_and_another_stops(
    toy: Toy, tmp_path: Path, unbroken: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    wanted = {2: "SAVE", 6: "STOP"}

    def at(point: str, step: int | None = None) -> bool:
        if point == "step" and step in wanted:
            (folder / wanted[step]).touch()
        return False

    monkeypatch.setattr("lmtrain.train.loop.fault_point", at)
    monkeypatch.setattr(save_and_stop_requests, "_CHECK_INTERVAL_S", 0.0)
    typed = toy.settings(folder, checkpoint__interval_steps=0)
    said = lmtrain("pretrain", *typed, code=79)
    assert "the file STOP at step 7 of 12: a checkpoint is saved" in said
    assert checkpoints(folder) == ["step_00000003", "step_00000007"]
    assert not [path.name for path in folder.iterdir() if path.name in ("SAVE", "STOP")]
    facts = {"cause": "the file STOP", "exit_code": 79, "requeue": False}
    assert {key: stop_of(folder)[key] for key in facts} == facts
    assert "stopped by the file STOP" in lmtrain("inspect", folder)
    monkeypatch.undo()
    lmtrain("pretrain", *typed)
    assert trained(folder) == unbroken


@pytest.mark.wide
def test_a_file_from_before_the_run_stops_it_once_and_aloud(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "STOP").touch()
    said = lmtrain("pretrain", *toy.settings(folder), code=79)
    assert f"The file {folder}/STOP, which asks a run to stop, existed before this start. It has been removed" in said
    lmtrain("pretrain", *toy.settings(folder))


@pytest.mark.wide
def test_checkpoints_by_time_stand_beside_those_by_steps(toy: Toy, tmp_path: Path) -> None:
    by_time = toy.settings(tmp_path / "a", checkpoint__interval_steps=0, checkpoint__interval_s="0.001s")
    lmtrain("pretrain", *by_time, "train.steps=3", "checkpoint.keep_last=9")
    assert checkpoints(tmp_path / "a") == ["step_00000001", "step_00000002", "step_00000003"]
    by_both = toy.settings(tmp_path / "b", checkpoint__interval_s="1h")
    lmtrain("pretrain", *by_both, "train.steps=5", "checkpoint.keep_last=9")
    assert checkpoints(tmp_path / "b") == ["step_00000004", "step_00000005"]
    never = toy.settings(tmp_path / "c", checkpoint__interval_steps="null", checkpoint__interval_s="5min")
    said = lmtrain("pretrain", *never, code=2)
    assert "checkpoint.interval_s=300.0 would save checkpoints, but with interval_steps=null nothing is saved" in said


@pytest.mark.wide
def test_the_dry_run_says_how_often_to_save_where_it_knows(toy: Toy, tmp_path: Path) -> None:
    typed = toy.settings(tmp_path / "run")
    assert "save_every" not in json.loads(lmtrain("pretrain", *typed, "--dry-run", "--json"))
    asked = [*typed, "run.time_between_failures=3h", "--dry-run", "--json"]
    assert "has not saved yet" in json.loads(lmtrain("pretrain", *asked))["save_every"]
    lmtrain("pretrain", *typed)
    said = json.loads(lmtrain("pretrain", *asked, "train.steps=20"))["save_every"]
    assert said.startswith("checkpoint.interval_s=")
    assert said.endswith(" ms, and 3h00m pass between failures")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("action", "point"),
    [("usr1", "start.imports"), ("term", "start.rendezvous"), ("usr1", "start.build"), ("term", "start.loop"),
     ("usr1", "forward"), ("usr1", "forward:step=4")],
)  # fmt: skip
def test_two_processes_that_hear_of_it_end_alike(toy: Toy, tmp_path: Path, action: str, point: str) -> None:
    folder = tmp_path / "run"
    typed = [*toy.settings(folder), "parallel.dp_shard=2", "--nproc", 2]
    process = start("pretrain", *typed, env=faulty(f"{action}:point={point}"))
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 75, output
    assert stop_of(folder)["exit_code"] == 75
    assert NAMES[action] in stop_of(folder)["cause"]
    assert ("SIGUSR1: stopping after the next step" in output) == (point == "forward:step=4"), output


@pytest.mark.wide
@pytest.mark.parametrize("nproc", [1, 2])
def test_the_second_signal_does_not_wait_for_a_step(toy: Toy, tmp_path: Path, nproc: int) -> None:
    """Of a run that takes minutes for its next step, since one of its processes stands still in it."""
    folder = tmp_path / "run"
    typed = [*toy.settings(folder), *(["parallel.dp_shard=2", "--nproc", nproc] if nproc > 1 else [])]
    process = start("pretrain", *typed, env=faulty(f"loop:point=forward:step=6:rank={nproc - 1}"))
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "fault: loop at forward" in line:
            break
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3.0)  # because: two within a second count as one, and on a busy machine the first may come late
    process.send_signal(signal.SIGTERM)
    output = "".join(seen) + process.communicate(timeout=300)[0]
    assert process.returncode == 75, output
    newest = str(folder / "checkpoints/step_00000004")
    stop = stop_of(folder)
    # because: rank 0 of two may wait in a collective, hear no signal of its own and leave at its peer's word
    causes = {"SIGTERM, and a second signal"} | ({"SIGTERM"} if nproc > 1 else set())
    assert stop.pop("cause") in causes
    assert stop == {"step": 4, "exit_code": 75, "requeue": True, "resume": newest}
