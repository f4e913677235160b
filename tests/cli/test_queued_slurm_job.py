"""Watching does not end while Slurm has the run's job in the queue again, and does where no start can be expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.start.slurm_job.queued_job import QueuedJob, query_job_state

STOPPED: dict[str, Any] = {"state": "stopped", "stopped": {"cause": "the end of the allocation", "exit_code": 75}}


class Slurm:
    """A clock and a queue."""

    now_s, state, num_queries = 100.0, "PENDING", 0

    def clock(self) -> float:
        return self.now_s

    def query(self, number: str) -> str:
        assert number == "4242"
        self.num_queries += 1
        return self.state


def job_of(folder: Path, slurm: Slurm, **environment: str) -> QueuedJob:
    (folder / "environment.json").write_text(json.dumps(environment))
    return QueuedJob(folder, slurm.query, slurm.clock)


def test_it_waits_in_the_queue_and_until_the_next_start_holds_its_folder(tmp_path: Path) -> None:
    slurm = Slurm()
    job = job_of(tmp_path, slurm, slurm_job="4242")
    assert "job 4242 in the queue again (PENDING)" in job.describe_wait(STOPPED)
    slurm.now_s, slurm.state = 5000.0, "RUNNING"
    assert job.describe_wait(STOPPED) == ""  # long after it was seen to wait


def test_a_job_that_has_just_begun_again_is_waited_for(tmp_path: Path) -> None:
    slurm = Slurm()
    job = job_of(tmp_path, slurm, slurm_job="4242")
    for state, says in (("COMPLETING", "in the queue"), ("PENDING", "in the queue"), ("RUNNING", "about to go on")):
        slurm.state = state
        assert says in job.describe_wait(STOPPED)
        slurm.now_s += 20.0
    slurm.now_s += 300.0
    assert job.describe_wait(STOPPED) == ""


def test_the_controller_is_asked_seldom(tmp_path: Path) -> None:
    slurm = Slurm()
    job = job_of(tmp_path, slurm, slurm_job="4242")
    for _ in range(60):
        assert job.describe_wait(STOPPED)
        slurm.now_s += 1.0
    assert slurm.num_queries == 4


@pytest.mark.parametrize("state", ["RUNNING", "", "CANCELLED"])
def test_a_job_that_was_not_seen_to_wait_is_not_waited_for(tmp_path: Path, state: str) -> None:
    """A run in a job of another script, or on a command line in one, ends when it ends."""
    slurm = Slurm()
    slurm.state = state
    assert job_of(tmp_path, slurm, slurm_job="4242").describe_wait(STOPPED) == ""


def test_what_does_not_start_again_asks_nobody(tmp_path: Path) -> None:
    slurm = Slurm()
    job = job_of(tmp_path, slurm, slurm_job="4242")
    assert job.describe_wait({"state": "finished", "stopped": {"cause": "done", "exit_code": 0}}) == ""
    assert job.describe_wait({"state": "stopped", "stopped": {"cause": "the file STOP", "exit_code": 79}}) == ""
    assert job_of(tmp_path, slurm).describe_wait(STOPPED) == ""
    assert job_of(tmp_path, slurm, slurm_job="4242; rm").describe_wait(STOPPED) == ""
    assert slurm.num_queries == 0


def test_where_there_is_no_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_job_state("4242") == ""
    (tmp_path / "squeue").write_text('#!/bin/sh\n[ "$2" = --jobs=4242 ] && echo PENDING\n')
    (tmp_path / "squeue").chmod(0o755)
    assert query_job_state("4242") == "PENDING"
