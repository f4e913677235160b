"""The end of an allocation, as a duration that no clock of a node can change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from lmtrain.runtime.processes.process_environment import SlurmJob, command_start_s
from lmtrain.train.in_loop.save_and_stop_requests import Allocation, parse_job_end

DAY = 86400.0


def allocation(
    job: SlurmJob | None, wall: float, ask: Callable[[str], float | None] = lambda number: None
) -> Allocation:
    return Allocation(job, clock=lambda: 50.0, wall_clock=lambda: wall, query=ask)


def test_what_is_left_is_what_the_job_was_told() -> None:
    assert allocation(SlurmJob("7", 1000.0, 4600.0), wall=1010.0).left_s() == 3590.0
    assert allocation(SlurmJob("7"), wall=1010.0).left_s() is None
    assert allocation(None, wall=1010.0).left_s() is None


@pytest.mark.parametrize(("skew", "left"), [(-DAY, 3600.0), (+DAY, None)])
def test_a_clock_that_is_wrong_by_a_day_neither_lends_time_nor_ends_a_run(skew: float, left: float | None) -> None:
    assert allocation(SlurmJob("7", 1000.0, 4600.0), wall=1010.0 + skew).left_s() == left


def test_more_time_is_heard_of_whatever_the_clock_says_by_then() -> None:
    ends, wall = [4600.0], [1010.0]
    found = Allocation(
        SlurmJob("7", 1000.0, 4600.0), clock=lambda: 50.0, wall_clock=lambda: wall[0], query=lambda number: ends[0]
    )
    wall[0] += DAY
    found.refresh("7")
    assert found.left_s() == 3590.0
    for change, left in ((600.0, 4190.0), (0.0, 4190.0), (-60.0, 4130.0), (0.0, 4130.0)):
        ends[0] += change
        found.refresh("7")
        assert found.left_s() == left


def test_scontrol_tells_where_the_environment_does_not() -> None:
    found = allocation(SlurmJob("7"), 1010.0, ask={"7": 4600.0}.get)
    found.refresh("7")
    assert found.left_s() == 3590.0


def test_what_scontrol_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    line = "JobId=7 JobName=a TimeLimit=00:02:00 StartTime=2026-11-22T20:00:00 EndTime=2026-11-22T20:02:00 Deadline=N/A"
    sibling = "JobId=8 ArrayJobId=7 ArrayTaskId=0 EndTime=2026-11-22T20:01:00"  # which has ended
    assert parse_job_end(line, "7") == parse_job_end(f"{sibling}\n{line}\n", "7") == 1795377720.0
    monkeypatch.undo()
    time.tzset()
    for said in ("", "JobId=7 JobName=a EndTime=Unknown", "slurm_load_jobs error: Invalid job id specified"):
        assert parse_job_end(said, "7") is None


def test_the_environment_of_a_job() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "4600"}
    assert SlurmJob.detect(env) == SlurmJob("7", 1000.0, 4600.0)
    assert SlurmJob.detect(env | {"SLURM_JOB_END_TIME": "soon"}) == SlurmJob("7", 1000.0, None)
    assert SlurmJob.detect({"SLURM_JOB_ID": "7;ls"}) is None
    assert SlurmJob.detect({}) is None


def test_the_launcher_says_when_a_command_began(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("40.5", 40.5), ("60", 50.0), ("x", 50.0)):
        monkeypatch.setitem(os.environ, "LMTRAIN_BEGAN_S", text)
        assert command_start_s(50.0) == expected
    monkeypatch.delitem(os.environ, "LMTRAIN_BEGAN_S")
    assert command_start_s(50.0) == 50.0
