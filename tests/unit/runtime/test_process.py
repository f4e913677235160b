"""Who a process is, under each launcher; and a report that holds no secret."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain.errors import UsageError
from lmtrain.runtime.processes.process_environment import (
    STORE_FD_VARIABLE,
    ProcessEnv,
    Rendezvous,
    environment_report,
    fault_request,
    first_host,
    git_commit,
    num_usable_cpus,
    ranks_text,
    set_library_defaults,
)

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
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK is two, which is not a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is -1"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 .* do not fit WORLD_SIZE=4"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 do not fit"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "0"}, "SLURM_PROCID=5"),
    ],
)
def test_half_set_or_impossible_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProcessEnv.detect(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[1-2]", "n1"), ("n[003,007-9],login", "n003"), ("a,b[1-2]", "a"), ("r[1-2]n[5-6]x", "r1n5x")],
)
def test_the_first_of_slurms_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(("node", "size"), [("0", 4), ("1", 4), ("2", 3), ("3", 0)])
def test_tasks_on_a_node(node: str, size: int) -> None:
    env = ProcessEnv.detect({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": node})
    assert env.local_world_size == size


def test_a_node_of_slurm_has_slurms_name() -> None:
    assert ProcessEnv.detect({**SRUN, "SLURMD_NODENAME": "n2"}).label == "rank 5 on n2"


def test_srun_meets_on_the_steps_first_node_at_a_port_of_its_own() -> None:
    env = {**SRUN, "SLURM_STEP_NODELIST": "n[1-2]"}
    first = Rendezvous.detect(ProcessEnv.detect(env), env)
    assert (first.host, first.stays_on_node, first.listen_fd) == ("n1", False, None)
    assert 20_000 <= first.port < 30_000
    assert first == Rendezvous.detect(ProcessEnv.detect(env | {"SLURM_PROCID": "0"}), env)
    for other in ({"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "78"}):
        there = Rendezvous.detect(ProcessEnv.detect(env | other), env | other)
        assert (there.port, there.name) != (first.port, first.name)
        assert there.port != first.port
    ports = set()
    for job, step in ((job, step) for job in ("77", "78", "79") for step in ("0", "1", "2")):
        env |= {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}
        ports.add(Rendezvous.detect(ProcessEnv.detect(env), env).port)
    assert len(ports) == 9  # steps of jobs that may run side by side
    requeued = Rendezvous.detect(ProcessEnv.detect(env), env | {"SLURM_RESTART_COUNT": "3"})
    assert requeued.name != first.name
    given = env | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    there = Rendezvous.detect(ProcessEnv.detect(given), given)
    assert (there.host, there.port) == ("head", 1234)


def test_srun_on_one_node_stays_on_it() -> None:
    env = {**SRUN, "SLURM_STEP_NODELIST": "n1"}
    at = Rendezvous.detect(ProcessEnv.detect(env), env)
    assert (at.host, at.stays_on_node) == ("127.0.0.1", True)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_peers_without_a_place_to_meet_are_refused(missing: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    del env[missing]
    with pytest.raises(UsageError, match=f"{missing} is not set"):
        Rendezvous.detect(ProcessEnv.detect(env), env)


@pytest.mark.parametrize("port", ["99999", "65536", "0", "-1", "abc", "", "29500 ", "999999999999"])
@pytest.mark.parametrize("others", [{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, SRUN])
def test_a_port_that_is_none_is_refused_before_anything(port: str, others: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"MASTER_PORT(=| is ){port}"):
        ProcessEnv.detect({**others, "MASTER_PORT": port})


@pytest.mark.parametrize("others", [{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, SRUN])
def test_a_token_may_be_given_to_any_launcher(others: dict[str, str]) -> None:
    env = {**others, "MASTER_PORT": "1"}
    process = ProcessEnv.detect(env)
    assert Rendezvous.detect(process, env | {"LMTRAIN_RUN_TOKEN": "a" * 32}).token == "a" * 32
    assert Rendezvous.detect(process, env | {"LMTRAIN_RUN_TOKEN": ""}).token is None
    for wrong in ("a" * 31, "A" * 32, "secret"):
        with pytest.raises(UsageError, match="LMTRAIN_RUN_TOKEN must have 32 lower-case hexadecimal digits") as caught:
            Rendezvous.detect(process, env | {"LMTRAIN_RUN_TOKEN": wrong})
        assert wrong not in str(caught.value)  # because: messages are kept, and this may be a password


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 2, 8, 9, 10], "ranks 0, 2 and 8-10"),
     (list(range(0, 64, 2)), "32 ranks from 0 to 62")],
)  # fmt: skip
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_each_restart_of_torchrun_meets_anew() -> None:
    """Its agent's store still holds the addresses of workers that have died."""
    env = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    again = env | {"TORCHELASTIC_RESTART_COUNT": "1"}
    first = Rendezvous.detect(ProcessEnv.detect(env), env)
    assert (first.held_by_launcher, first.stays_on_node) == (True, False)
    assert first.name != Rendezvous.detect(ProcessEnv.detect(again), again).name


def test_children_of_our_own_launcher() -> None:
    token = "0123456789abcdef" * 2
    ranks = ProcessEnv().as_launcher(2)
    first = ranks.shared_environment({"KEPT": "1"}) | ranks.rank_environment(0, 1234, token) | {STORE_FD_VARIABLE: "7"}
    second = ranks.rank_environment(1, 1234, token)
    env = ProcessEnv.detect(first)
    assert (env.launcher, env.rank, env.world_size, env.local_world_size) == ("lmtrain", 0, 2, 2)
    assert Rendezvous.detect(env, first) == Rendezvous("127.0.0.1", 1234, "attempt 0", 7, True, token=token)
    assert Rendezvous.detect(ProcessEnv.detect(second), second) == Rendezvous(
        "127.0.0.1", 1234, "attempt 0", None, True, token=token
    )
    assert token not in repr(Rendezvous.detect(env, first))
    assert first["KEPT"] == "1"
    assert first["OMP_NUM_THREADS"] == str(max(1, num_usable_cpus() // 2))
    assert ProcessEnv().as_launcher(4096).shared_environment({})["OMP_NUM_THREADS"] == "1"
    one_of_many = ProcessEnv(3, 64, launcher="slurm", host="n4")  # whose node has its cores to itself
    assert one_of_many.shared_environment({})["OMP_NUM_THREADS"] == str(num_usable_cpus())
    assert ranks.shared_environment({"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


def test_a_launcher_on_each_node_of_a_slurm_step() -> None:
    """Ranks of such a launcher meet as tasks of srun do, and each takes the GPU with its place on the node."""
    task = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    task |= {"SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_GPUS_PER_TASK": "8", "SLURM_RESTART_COUNT": "2"}
    first = ProcessEnv.detect(task).as_launcher(8, "--nproc-per-node")
    assert (first.rank, first.world_size, first.local_world_size, first.num_own_gpus) == (8, 24, 8, 0)
    assert (first.num_ranks, first.has_peers, first.label) == (8, True, f"node {first.host}")
    env = first.shared_environment(task) | first.rank_environment(3, 0, "")
    rank = ProcessEnv.detect(env)
    assert (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size) == (11, 24, 3, 8)
    assert (rank.launcher, rank.num_restarts, rank.num_own_gpus, rank.is_child) == ("slurm", 2, 0, True)
    assert (rank.num_ranks, rank.has_peers, rank.label) == (1, True, f"rank 11 on {rank.host}")
    assert ProcessEnv.detect(task).as_launcher(1, "--nproc-per-node") == ProcessEnv.detect(task)
    assert Rendezvous.detect(rank, env) == Rendezvous.detect(ProcessEnv.detect(task), task)
    assert "GLOO_SOCKET_IFNAME" not in env
    several = task | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    with pytest.raises(UsageError, match=r"srun has started 2 tasks on .* Use srun --ntasks-per-node=1"):
        ProcessEnv.detect(several).as_launcher(8, "--nproc-per-node")
    with pytest.raises(UsageError, match="--nproc-per-node=2 would start 2 processes from each process that"):
        rank.as_launcher(2, "--nproc-per-node")


def test_a_launcher_starts_no_launcher() -> None:
    assert ProcessEnv().as_launcher(1) == ProcessEnv()
    four = ProcessEnv().as_launcher(4)
    assert (four.world_size, four.has_peers) == (4, False)
    with pytest.raises(UsageError, match=r"each process that slurm has started\. Leave out --nproc, or give"):
        ProcessEnv.detect(SRUN).as_launcher(2)


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
    script = "import sys, lmtrain.runtime.processes.process_environment as process; process.environment_report(); "
    script += "sys.exit('torch' in sys.modules)"
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


@pytest.mark.parametrize(("before", "after"), [({}, "10000"), ({"GOMP_SPINCOUNT": "30000"}, "30000")])
def test_cores_are_shared_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: str
) -> None:
    monkeypatch.setattr(os, "environ", dict(before))
    set_library_defaults()
    assert os.environ["GOMP_SPINCOUNT"] == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
)
def test_segments_of_memory_grow_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(before))
    set_library_defaults()
    assert os.environ == after | {"GOMP_SPINCOUNT": "10000"}
