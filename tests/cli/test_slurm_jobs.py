"""What `lmtrain slurm submit` sends to a real Slurm with two nodes, and what becomes of it when things go wrong.

The job is cut in all ways: tp2 pp2 dp2, eight tasks on two nodes. Whatever happens on the way, its losses and norms
are to the last bit those of a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Toy, lmtrain
from tests.cli.test_slurm import srun
from tests.cli.two_nodes import BatchJob, need_two_nodes, slurm, until

pytestmark = pytest.mark.slow
CUT: dict[str, Any] = {"parallel__tp": 2, "parallel__pp": 2, "parallel__dp_shard": 2, "train__micro_batch": 1}
STEPS = 1000  # more than are done in two minutes
ALL = list(range(1, STEPS + 1))
QUEUED = ": queued again"


@pytest.fixture(scope="module", autouse=True)
def _two_nodes() -> None:
    need_two_nodes()


def settings(toy: Toy, folder: Path, **more: Any) -> list[str]:
    saves_at_the_end = {"checkpoint__interval_steps": 0}
    sizes: dict[str, Any] = {"train__steps": STEPS, "parallel__timeout_s": 120, **saves_at_the_end, **CUT, **more}
    return toy.settings(folder, **sizes)


@pytest.fixture(scope="module")
def unbroken(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> BatchJob:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    job = BatchJob.submit(folder, *settings(toy, folder))
    assert f"done: {STEPS} steps" in job.until_over()
    return job


def goes_on_as(job: BatchJob, unbroken: BatchJob, step: int) -> str:
    """Wait for this step, end the job, compare all steps until there; the log."""
    job.until_step(step)
    slurm("scancel", job.number)
    log = job.until_over()
    assert job.losses == unbroken.losses[: len(job.losses)]
    return log


def test_a_job_ends_in_time_and_queues_itself_again(toy: Toy, tmp_path: Path, unbroken: BatchJob) -> None:
    """Slurm is asked for no signal."""
    job = BatchJob.submit(tmp_path / "run", *settings(toy, tmp_path / "run"), "--time", 2)
    while not job.is_over:
        job.until_queued_or_over()
        until(lambda: job.state != "PENDING", "the job does not start")
    log = job.until_over()
    assert "the end of the allocation" in log
    assert QUEUED in log
    assert job.steps == ALL  # none was done twice
    assert job.losses == unbroken.losses


@pytest.mark.parametrize(("tasks", "victim"), [("node", {"rank": 5}), ("node", {"launcher": "n2"}),
                                               ("rank", {"rank": 5})])  # fmt: skip
def test_what_is_killed_starts_again_in_the_same_allocation(
    toy: Toy, tmp_path: Path, unbroken: BatchJob, tasks: str, victim: dict[str, Any]
) -> None:
    words = settings(toy, tmp_path / "run", checkpoint__interval_steps=10)
    job = BatchJob.submit(tmp_path / "run", *words, tasks=tasks)
    job.until_step(15)
    (process,) = job.processes(**victim)
    os.kill(process, signal.SIGKILL)
    log = goes_on_as(job, unbroken, 40)
    # because: the other node's launcher may end sooner than the one that knows of the signal
    assert len(re.findall(r"lost a task \(exit code (137|76) on n2\), starts again", log)) == 1, log
    assert QUEUED not in log


def test_stops_at_any_moment_queue_the_job_and_lose_nothing(toy: Toy, tmp_path: Path, unbroken: BatchJob) -> None:
    job, rng = BatchJob.submit(tmp_path / "run", *settings(toy, tmp_path / "run")), random.Random(15)
    for number in range(20):
        job.until_running()
        time.sleep(rng.uniform(0, 30))  # the moment itself
        slurm("scancel", "--full", "--signal=USR1", job.number)
        if job.is_over:
            break
        job.until_queued()
        assert job.log.count(QUEUED) == number + 1
    log = job.until_over()
    assert "starts again" not in log
    assert job.steps == ALL
    assert job.losses == unbroken.losses


def test_what_is_cancelled_saves_and_is_not_queued_again(toy: Toy, tmp_path: Path, unbroken: BatchJob) -> None:
    words = settings(toy, tmp_path / "run")
    job = BatchJob.submit(tmp_path / "run", *words)
    job.until_step(5)
    slurm("scancel", job.number)
    assert QUEUED not in job.until_over()
    assert job.state in ("", "CANCELLED")
    stop = json.loads((job.folder / "stop.json").read_text())
    assert (stop["exit_code"], stop["step"]) == (75, job.steps[-1])
    again = BatchJob.submit(tmp_path / "run", *words)
    goes_on_as(again, unbroken, max(job.steps) + 20)
    assert again.steps == ALL[: len(again.steps)]  # none was done twice


def test_a_node_that_goes_down_and_comes_back(toy: Toy, tmp_path: Path, unbroken: BatchJob) -> None:
    """Slurm itself queues the job again, and starts it when there are two nodes."""
    job = BatchJob.submit(tmp_path / "run", *settings(toy, tmp_path / "run", checkpoint__interval_steps=10))
    job.until_step(15)
    slurm("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    try:
        job.until_queued()
    finally:
        slurm("scontrol", "update", "nodename=n2", "state=resume")
    assert "DUE TO NODE FAILURE" in goes_on_as(job, unbroken, 40)


def test_a_node_that_loses_a_task_is_left_out_for_the_spare_one(toy: Toy, tmp_path: Path) -> None:
    """One of two nodes is used; the run goes on, on the other."""
    run, two = tmp_path / "run", {"parallel__tp": 2, "train__steps": 60, "checkpoint__interval_steps": 5}
    lmtrain("pretrain", *toy.settings(tmp_path / "whole", **two), "--nproc", 2, env={"OMP_NUM_THREADS": "1"})
    job = BatchJob.submit(run, *toy.settings(run, **two), "--spare-nodes", 1, tasks_per_node=2)
    job.until_step(10)
    os.kill(job.processes(rank=1)[0], signal.SIGKILL)
    log = job.until_over()
    assert "lost a task (exit code 137 on n1), starts again without n1" in log
    assert job.losses == BatchJob("", tmp_path / "whole").losses
    assert job.steps[-1] == 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("no Slurm with two nodes and a right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_ends_the_job_for_good(toy: Toy, small_disk: Path) -> None:
    """There is room for it all at first, and then for nothing."""
    job = BatchJob.submit(small_disk / "run", *settings(toy, small_disk / "run", checkpoint__interval_steps=20))
    job.until_step(25)
    filler = ["dd", "if=/dev/zero", f"of={small_disk / 'filler'}", "bs=4096"]
    assert b"No space left" in subprocess.run(filler, capture_output=True).stderr
    until(lambda: job.is_over, job.log)
    number, said = job.number, slurm("scontrol", "show", "job", job.number)
    (small_disk / "filler").unlink()
    assert "ExitCode=74:0" in said, f"job {number}: {said}\n{job.log}"
    assert "Restarts=0" in said
    assert not list((small_disk / "run" / "checkpoints").glob("*.tmp*"))


def test_an_evaluation_by_srun_has_the_numbers_of_one_process(toy: Toy, tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "run"))
    text = tmp_path / "text.txt"
    text.write_text(next(toy.text.iterdir()).read_text()[:2000])
    words = ["eval", tmp_path / "run", "--task", "perplexity", "--data", text, "--device", "cpu"]
    lmtrain(*words, "--output", tmp_path / "one.json")
    code, said = srun(*words, "--output", tmp_path / "many.json", "parallel.tp=2", "parallel.pp=2")
    assert code == 0, said
    one, many = (json.loads((tmp_path / name).read_text())["results"][0] for name in ("one.json", "many.json"))
    assert many["layout"] == "pp 2 x tp 2"
    assert many["measures"] == pytest.approx(one["measures"], rel=1e-6)
