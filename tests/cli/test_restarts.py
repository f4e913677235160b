"""`lmtrain pretrain --max-restarts`: a run that loses a process goes on by itself, and one that gets nowhere stops."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from lmtrain.runfolder.folder_reader import read_run_state
from tests.cli.harness import Toy, lmtrain, start

EXACT = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "samples_hash")
TWO: dict[str, Any] = {
    "parallel__dp_shard": 2, "parallel__timeout_s": 60, "model__dropout": 0.1, "checkpoint__asynchronous": "false"
}  # fmt: skip


def fault(*texts: str) -> dict[str, str]:
    return {"LMTRAIN_FAULT": ",".join(texts), "LMTRAIN_ALLOW_FAULTS": "1"}


def ended(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, str]:
    """A process of its own, since a launcher's children write to its terminal."""
    process = start("pretrain", *arguments, env=env)
    output, _ = process.communicate(timeout=900)
    return process.returncode, output


def curve(folder: Path) -> list[tuple[Any, ...]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]
    return [tuple(row[key] for key in EXACT) for row in rows]


def roots(folder: Path) -> dict[str, str]:
    manifest = json.loads((folder / "checkpoints" / "step_00000012" / "manifest.json").read_text())
    return {name: entry["root"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


def stop_facts(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "stop.json").read_text()))


def lost(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "starts.json").read_text())["lost"])


@pytest.fixture(scope="module")
def unbroken(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    code, output = ended(*toy.settings(folder, **TWO), "--nproc", 2)
    assert code == 0, output
    return folder


@pytest.mark.wide
def test_a_run_that_loses_processes_goes_on_by_itself(toy: Toy, unbroken: Path, tmp_path: Path) -> None:
    """Twice, in the middle of a step and of a checkpoint: the curve and the weights of an unbroken run, bit for bit."""
    folder = tmp_path / "run"
    faults = fault("kill:point=step:step=5:rank=1:restart=0", "segv:point=ckpt.mid_write:rank=0:restart=1")
    code, output = ended(*toy.settings(folder, **TWO), "--nproc", 2, "--max-restarts", 2, env=faults)
    assert code == 0, output
    for rank, name, number in ((1, "SIGKILL", 2), (0, "SIGSEGV", 3)):
        assert re.search(rf"rank {rank} on \S+ (was ended by {name}|ended without a word)", output), output
        assert f"Start {number} of 3 goes on from step 4, {folder / 'checkpoints' / 'step_00000004'}." in output
    assert curve(folder) == curve(unbroken)
    assert roots(folder) == roots(unbroken)
    assert stop_facts(folder)["cause"] == "done"
    assert not (folder / "starts.json").exists()
    assert not list((folder / "checkpoints").glob("*.tmp*"))


@pytest.mark.wide
def test_a_run_that_gets_nowhere_is_given_up(toy: Toy, tmp_path: Path) -> None:
    """Three starts at one step, whoever starts them; mending something makes another try."""
    folder = tmp_path / "run"
    settings = [*toy.settings(folder, **TWO), "--nproc", 2]
    code, output = ended(*settings, "--max-restarts", 9, env=fault("kill:point=step:step=1:rank=1"))
    assert code == 93, output
    assert output.count("goes on from the beginning, since nothing is saved yet") == 2
    assert "was started 3 times from the beginning, and lost each time before the next checkpoint: rank 1 o" in output
    facts = stop_facts(folder)
    assert (facts["exit_code"], facts["requeue"], facts["step"]) == (93, False, 0)
    assert len(lost(folder)) == 3
    code, output = ended(*settings)
    assert code == 93, output  # said once more, and nothing is started
    assert output.count("error: ") == 1
    code, output = ended(*settings, "checkpoint.keep_last=3")
    assert code == 0, output
    assert not (folder / "starts.json").exists()


@pytest.mark.wide
def test_the_last_loss_is_the_one_that_is_told(toy: Toy, tmp_path: Path) -> None:
    """The watch has written why the first start was lost; nobody but the launcher can say why the second was."""
    folder = tmp_path / "run"
    faults = fault("kill:point=step:step=5:rank=1:restart=0", "kill:point=start.imports:rank=0:restart=1")
    code, output = ended(*toy.settings(folder, **TWO), "--nproc", 2, "--max-restarts", 1, env=faults)
    assert code == 76, output
    assert re.search("error: rank 0 .*SIGKILL", output), output
    facts = stop_facts(folder)
    assert (facts["rank"], "rank 0" in facts["cause"]) == (0, True)


@pytest.mark.wide
def test_one_process_may_be_watched_too(toy: Toy, tmp_path: Path) -> None:
    settings = toy.settings(tmp_path / "run", checkpoint__asynchronous="false")
    code, output = ended(*settings, "--max-restarts", 1, env=fault("exc:point=step:step=5:restart=0"))
    assert code == 0, output
    assert "rank 0 failed with exit code 1, as it says above. Start 2 of 2 goes on from step 4" in output
    assert "fault at step" in output
    assert curve(tmp_path / "run")[-1][0] == 12


def test_starts_that_are_lost_are_counted_and_others_are_not(toy: Toy, tmp_path: Path) -> None:
    """In this process: a crash is what a lost start is."""
    folder = tmp_path / "run"
    settings = toy.settings(folder, train__steps=2, checkpoint__interval_steps=2, schedule__warmup_steps=1)
    for number in (1, 2, 3):
        lmtrain("pretrain", *settings, code=1, env=fault("exc:point=step:step=1"))
        assert [one["how"] for one in lost(folder)] == ["RuntimeError: fault at step"] * number
    lmtrain("pretrain", *settings, code=2, env={"LMTRAIN_FAULT": "exc:point=step"})  # refused, and counts for nothing
    assert len(lost(folder)) == 3
    output = lmtrain("pretrain", *settings, code=93)
    assert "was started 3 times from the beginning, and lost each time before the next checkpoint" in output
    assert "RuntimeError: fault at step (3 times)" in output
    (folder / "starts.json").unlink()
    lmtrain("pretrain", *settings)
    assert not (folder / "starts.json").exists()


def test_others_processes_are_not_ours_to_start_again(toy: Toy, tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run"), "--max-restarts", 2, code=2, env=env)
    assert "--max-restarts=2 restarts only processes that lmtrain has started" in output


def test_fewer_processes_than_the_layout_asks_for(toy: Toy, tmp_path: Path) -> None:
    settings = toy.settings(tmp_path / "run", parallel__dp_shard=4, train__micro_batch=1)
    said = "2 processes share the work of 4: dp_shard 2, zero 1, where the settings say dp_shard 4, zero 1."
    output = lmtrain("pretrain", *settings, "--nproc", 2, "--elastic", "--dry-run")
    assert output.count(said) == 1
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    env |= {"MASTER_PORT": "1"}
    assert said in lmtrain("pretrain", *settings, "--elastic", "--print-config", env=env)  # of torchrun
    output = lmtrain("pretrain", *settings, "--nproc", 3, "--elastic", code=78)
    assert "3 processes were started with --elastic, and no layout of them takes train.global_batch=4" in output
    assert "Start 1, 2 or 4," in output
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
def test_a_run_goes_on_with_fewer_processes(toy: Toy, tmp_path: Path) -> None:
    """The same samples in the same order, and so the losses of an unbroken run but for rounding."""
    sizes: dict[str, Any] = {"parallel__dp_shard": 2, "parallel__tp": 2, "parallel__timeout_s": 60}
    lmtrain("pretrain", *toy.settings(tmp_path / "one"))
    code, output = ended(
        *toy.settings(tmp_path / "run", **sizes), "--nproc", 4, env=fault("kill:point=step:step=9:rank=3")
    )
    assert code == 76, output
    code, output = ended(*toy.settings(tmp_path / "run", **sizes), "--nproc", 2, "--elastic")
    assert code == 0, output
    assert output.count("2 processes share the work of 4: tp 2, where") == 1
    ours, theirs = curve(tmp_path / "run"), curve(tmp_path / "one")
    assert [row[4:] for row in ours] == [row[4:] for row in theirs]  # samples, tokens, hashes
    assert [row[1] for row in ours] == pytest.approx([row[1] for row in theirs], rel=1e-5)


@pytest.mark.wide
def test_a_start_passes_over_a_checkpoint_that_cannot_be_read(toy: Toy, unbroken: Path, tmp_path: Path) -> None:
    """Aloud, and with checkpoint.fallback=true alone."""
    folder = tmp_path / "run"
    settings = [*toy.settings(folder, **TWO), "--nproc", 2]
    code, output = ended(*settings, env=fault("kill:point=step:step=9:rank=1"))
    assert code == 76, output
    (file, *_) = (folder / "checkpoints" / "step_00000008").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = [*settings, "--max-restarts", 2]
    code, output = ended(*again)
    assert code == 65, output
    assert "step_00000008/rank_00000.safetensors is damaged" in output
    assert "Start 2" not in output  # what is damaged stays so
    code, output = ended(*again, "checkpoint.fallback=true", env=fault("kill:point=step:step=6:rank=0:restart=0"))
    assert code == 0, output
    assert "step_00000008 is set aside" in output
    assert "Start 2 of 3 goes on from step 4" in output
    assert curve(folder) == curve(unbroken)
    assert roots(folder) == roots(unbroken)


def in_pause(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if "Start 2 of" in line:
            return
    raise AssertionError("it did not start again")


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stop_between_two_starts(toy: Toy, tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    settings = [*toy.settings(folder, **TWO), "--nproc", 2, "--max-restarts", 9]
    process = start("pretrain", *settings, env=fault("kill:point=step:step=5:rank=1"))
    before = "".join(in_pause(process))
    assert read_run_state(folder)["state"] == "running"  # so that `lmtrain watch` goes on
    process.send_signal(number)
    after, _ = process.communicate(timeout=600)
    assert process.returncode == 75, before + after
    assert "Start 3" not in after
    facts = stop_facts(folder)
    assert (facts["exit_code"], facts["requeue"]) == (75, True)
    assert facts["cause"].startswith(number.name)


def after(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert any(line in found for found in process.stdout), line


@pytest.mark.wide
def test_a_stop_that_comes_of_a_loss_is_that_loss(toy: Toy, tmp_path: Path) -> None:
    """As srun does it, which ends all tasks once one is gone: before the first step, too, the start was lost."""
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    env = meeting | fault("loop:point=start.build:rank=0", "stop:point=start.build:rank=1")
    words = ["pretrain", *toy.settings(folder, **TWO)]
    ranks = [start(*words, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    for rank in ranks:
        after(rank, "at start.build")
    ranks[1].kill()
    ranks[1].communicate(timeout=60)
    ranks[0].terminate()
    output, _ = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 76, output
    facts = stop_facts(folder)
    assert (facts["exit_code"], facts["lost"]) == (76, 1)
    assert [one["how"] for one in lost(folder)] == [facts["cause"]]


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
def test_a_launcher_that_is_killed_leaves_nobody(toy: Toy, tmp_path: Path) -> None:
    """Not even a rank that stands still."""
    process = start("pretrain", *toy.settings(tmp_path / "run", **TWO, train__steps=500), "--nproc", 2, fresh=True)
    assert process.stdout is not None
    assert any(line.startswith("step   2/") for line in process.stdout)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [int(pid) for pid in children if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
    ends = [os.pidfd_open(int(pid)) for pid in children]
    os.kill(ranks[1], signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=60)  # returns when nobody holds its output
    for end in ends:
        assert select.select([end], [], [], 60)[0]
        os.close(end)
