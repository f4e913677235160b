"""What a second terminal shows of a run that goes on, has ended, was killed, or is not there yet."""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmtrain.start.slurm_job import queued_job
from tests.cli.harness import Toy, lmtrain, on_terminal, start

LONG_S = 120.0


@pytest.fixture(scope="module")
def ended(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "run"
    lmtrain("pretrain", *toy.settings(folder, train__valid_interval_steps=6, train__valid_samples=2))
    return folder


def test_a_run_that_ended_elsewhere_than_on_a_terminal(ended: Path) -> None:
    shown = lmtrain("watch", ended)
    assert re.search(r"^step 12/12  loss \d\.\d{4} ", shown, re.MULTILINE)
    assert re.search(r"^finished [\d.msh]+ ago$", shown, re.MULTILINE)
    assert len(shown.splitlines()) == 2


@pytest.mark.parametrize("columns", [80, 120])
def test_a_run_that_ended_on_a_terminal(ended: Path, columns: int) -> None:
    shown = on_terminal("watch", ended, columns=columns)
    lines = shown.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(shown.split())
    for figure in (f"{ended}"[:30], "step 12/12", "left 0s", "at step 12", "last save", "learning rate", "tokens/s"):
        assert figure in words
    assert re.search(r"finished [\d.msh]+ ago", words)


def test_a_run_that_failed_says_why(ended: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (copy / name).write_bytes((ended / name).read_bytes())
    assert "killed" in lmtrain("watch", copy, code=1)
    (copy / "stop.json").write_text(json.dumps({"cause": "the disk is full", "exit_code": 74}))
    assert "failed with exit code 74" in lmtrain("watch", copy, code=1)
    assert "the disk is full" in on_terminal("watch", copy, code=1)


def test_it_goes_on_while_slurm_has_the_job_in_the_queue(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    lmtrain("pretrain", *toy.settings(tmp_path, train__steps=3))
    (tmp_path / "stop.json").write_text(json.dumps({"cause": "SIGUSR1", "exit_code": 75}))
    states = iter(["PENDING", "PENDING", "", ""])
    monkeypatch.setattr(queued_job, "_QUERY_S", 0.0)
    monkeypatch.setattr(queued_job, "query_job_state", lambda number: next(states))
    text = lmtrain("watch", tmp_path, "--every", 0.2)
    assert len(re.findall(r"stopped by SIGUSR1 .*\nSlurm has job 4242 in the queue again", text)) == 1
    assert list(states) == [""]


def test_who_is_slow_is_said_when_it_changes(ended: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    (copy / "config.json").write_bytes((ended / "config.json").read_bytes())
    row = json.loads((ended / "metrics.jsonl").read_bytes().splitlines()[-4])
    assert row["event"] in ("step", "save", "valid")
    row |= {
        "event": "step", "step": 12, "loss": 3.0, "straggler_rank": 3, "straggler_host": "n7", "straggler_by": 0.1,
        "straggler_coordinate": {"tp": 1}, "straggler_span": "forward", "straggler_ranks": [3],
        "straggler_span_s": 0.05, "straggler_usual_s": 0.04,
    }  # fmt: skip
    (copy / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    said = "rank 3 on n7 (tp 1): +10.0%, most of all forward, 50.0 ms beside 40.0 ms a step"
    assert f"slow: {said}" in lmtrain("watch", copy, code=1)
    assert said in " ".join(re.sub("[│╭╮╰╯─]", " ", on_terminal("watch", copy, columns=120, code=1)).split())


def test_a_folder_that_is_not_there_or_no_run(tmp_path: Path) -> None:
    missing = tmp_path / "later"
    said = lmtrain("watch", missing, code=66)
    assert said == (
        f"error: {missing} does not exist. Give the run.dir of a run; without --once, and on "
        "a terminal, `lmtrain watch` waits for a run to begin in a folder.\n"
    )
    assert "no run has begun there, as it has no metrics.jsonl" in lmtrain("watch", tmp_path, "--once", code=66)
    assert "--every=0 must be at least 0.2 seconds" in lmtrain("watch", tmp_path, "--every", 0, code=2)


def test_records_that_no_run_writes_are_said(ended: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    (copy / "config.json").write_bytes((ended / "config.json").read_bytes())
    (copy / "metrics.jsonl").write_text('{"event": "step", "step": 3, "attempt": 1, "loss": {}}\n')
    assert "has unexpected content" in lmtrain("watch", copy, code=65)


class Second:
    """A second terminal, which is read as it is written."""

    def __init__(self, *arguments: object) -> None:
        self.host, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (30, 100))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmtrain", "watch", *map(str, arguments)], stdin=theirs, stdout=theirs,
            stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )  # fmt: skip
        os.close(theirs)
        self.text = ""
        # because: what is read at once may end within a character
        self.decoder = codecs.getincrementaldecoder("utf-8")()

    def until(self, there: Callable[[str], object]) -> str:
        """All that has come once this is so."""
        end = time.monotonic() + LONG_S
        while not there(self.text):
            assert time.monotonic() < end, self.text
            if select.select([self.host], [], [], 1.0)[0]:
                try:
                    self.text += self.decoder.decode(os.read(self.host, 1 << 16))
                except OSError:
                    break
        return self.text

    def ended(self) -> int:
        self.until(lambda text: self.process.poll() is not None)
        return self.process.wait(LONG_S)


def endless(toy: Toy, folder: Path) -> subprocess.Popen[str]:
    settings = toy.settings(folder, train__steps=1_000_000, checkpoint__interval_steps=100_000)
    return start("pretrain", *settings, output=subprocess.DEVNULL)


@pytest.mark.wide
def test_a_run_from_before_its_begin_until_it_is_killed(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    second = Second(folder, "--every", 0.2)
    second.until(lambda text: "waiting for a run to begin in" in " ".join(text.split()))
    run = endless(toy, folder)
    second.until(lambda text: len(set(re.findall(r"step (\d+)/1000000", text))) > 3 and "running: " in text)
    run.kill()
    run.wait(LONG_S)
    second.until(lambda text: "killed" in text)
    assert second.ended() == 1


@pytest.mark.wide
def test_a_folder_of_runs_is_no_run_to_wait_for(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
    said = lmtrain("watch", tmp_path, code=2)
    assert f"is not a run folder but contains runs: {tmp_path}/a, {tmp_path}/b. Give one" in said


@pytest.mark.wide
def test_ctrl_c_ends_the_watching_alone(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = endless(toy, folder)
    second = Second(folder, "--every", 0.2)
    second.until(lambda text: "step " in text and "running: " in text)
    second.process.send_signal(signal.SIGINT)
    assert "the watching ends here; the run is left as it is" in second.until(lambda text: "left as it is" in text)
    assert second.ended() == 0
    assert run.poll() is None
    run.kill()
    run.wait(LONG_S)
