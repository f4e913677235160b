"""Who a process is, under each launcher; and a report that holds no secret."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain.errors import UsageError
from lmtrain.runtime.process import ProcessEnv, environment_report, fault_request, git_commit

SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_RESTART_COUNT": "2",
}  # fmt: skip


def test_a_process_on_its_own() -> None:
    assert ProcessEnv.detect({}) == ProcessEnv(host=socket.gethostname())
    assert (ProcessEnv().rank, ProcessEnv().world_size, ProcessEnv().launcher) == (0, 1, "single")


def test_torchrun() -> None:
    env = ProcessEnv.detect({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert env == ProcessEnv(3, 4, 1, "torchrun", socket.gethostname(), None, 1)


def test_torchrun_inside_slurm_is_torchrun() -> None:
    env = ProcessEnv.detect({**SRUN, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})
    assert (env.launcher, env.rank, env.world_size, env.local_rank, env.job_id) == ("torchrun", 3, 4, 3, "77")


def test_srun() -> None:
    assert ProcessEnv.detect(SRUN) == ProcessEnv(5, 8, 1, "slurm", socket.gethostname(), "77", 2)


def test_srun_with_fewer_tasks_than_the_allocation() -> None:
    env = ProcessEnv.detect({**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"})
    assert (env.rank, env.world_size) == (1, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"},  # salloc's shell
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a batch script
        {**SRUN, "SLURM_STEP_ID": str(0xFFFF_FFFA), "SLURM_PROCID": "0"},  # an interactive step
        {**SRUN, "SLURM_STEP_ID": str(0xFFFF_FFFB), "SLURM_PROCID": "0"},  # a batch step
    ],
)
def test_an_allocation_without_srun_is_one_process(environ: dict[str, str]) -> None:
    assert ProcessEnv.detect(environ) == ProcessEnv(host=socket.gethostname(), job_id="77")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK is two, which is no whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is -1"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 .* do not fit WORLD_SIZE=4"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 do not fit"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "0"}, "SLURM_PROCID=5"),
    ],
)
def test_half_set_or_impossible_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProcessEnv.detect(environ)


def test_fault_requests() -> None:
    assert fault_request({}) == (None, False)
    assert fault_request({"LMTRAIN_FAULT": ""}) == (None, False)
    assert fault_request({"LMTRAIN_FAULT": "x", "LMTRAIN_ALLOW_FAULTS": "yes"}) == ("x", False)
    assert fault_request({"LMTRAIN_FAULT": "x", "LMTRAIN_ALLOW_FAULTS": "1"}) == ("x", True)


def test_the_report_is_plain_data_without_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-secret")
    monkeypatch.setenv("HF_TOKEN", "canary-secret")
    text = json.dumps(environment_report())
    assert "canary" not in text
    report = json.loads(text)
    assert report["python"] == sys.version.split()[0]
    assert report["packages"]["numpy"]
    assert report["num_usable_cpus"] >= 1


def test_the_report_does_not_import_torch() -> None:
    script = "import sys, lmtrain.runtime.process as p; p.environment_report(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_commit_is_read_from_gits_files(tmp_path: Path) -> None:
    commit, git = "0123456789abcdef" * 2 + "01234567", tmp_path / ".git"
    assert git_commit(tmp_path) is None
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text(commit + "\n")
    assert git_commit(tmp_path) == commit
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert git_commit(tmp_path) is None
    (git / "packed-refs").write_text(
        f"# pack-refs with: peeled\n{'f' * 40} refs/heads/other\n{commit} refs/heads/main\n"
    )
    assert git_commit(tmp_path) == commit
    (git / "refs" / "heads" / "main").write_text("e" * 40 + "\n")
    assert git_commit(tmp_path) == "e" * 40
    (git / "refs" / "heads" / "main").write_text("")
    assert git_commit(tmp_path) is None
