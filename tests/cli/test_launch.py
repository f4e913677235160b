"""`lmtrain pretrain --nproc N`: the losses of one process, refusals said once, and one end for all processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start
from tests.marks import slow, wide

TWO: dict[str, Any] = {"parallel__tp": 2, "parallel__timeout_s": 60}
LONG = TWO | {"train__steps": 300}


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


def stop_facts(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "stop.json").read_text()))


@pytest.fixture(scope="module")
def one(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    lmtrain("pretrain", *toy.settings(folder))
    return losses(folder)


def run_until_step(toy: Toy, folder: Path, step: int, **settings: object) -> subprocess.Popen[str]:
    process = start("pretrain", *toy.settings(folder, **settings), "--nproc", 2, fresh=True)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith(f"step {step:>3}/"):
            return process
    raise AssertionError("".join(seen))


@pytest.mark.wide
def test_two_processes_lose_a_peer_and_go_on_to_the_losses_of_one(toy: Toy, one: list[float], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = toy.settings(folder, **TWO)
    fault = {"LMTRAIN_FAULT": "kill:point=step:step=9:rank=1", "LMTRAIN_ALLOW_FAULTS": "1"}
    killed = start("pretrain", *settings, "--nproc", 2, env=fault, fresh=True)
    output, _ = killed.communicate(timeout=900)
    assert killed.returncode == 76, output
    assert len(re.findall(r"error: rank 1 on \S+ (?:was ended by SIGKILL|ended without a word)", output)) == 1
    assert output.count("step  1/12") == 1  # one process shows the run
    assert {key: stop_facts(folder)[key] for key in ("exit_code", "rank", "requeue")} == {
        "exit_code": 76, "rank": 1, "requeue": True
    }  # fmt: skip
    again = start("pretrain", *settings, "--nproc", 2)
    output, _ = again.communicate(timeout=900)
    assert again.returncode == 0, output
    assert re.search(r"at step [48]\b", output), output  # of the checkpoint: the newest may not have been whole yet
    assert output.count("done: 12 steps") == 1
    assert losses(folder) == pytest.approx(one, abs=1e-5)
    assert stop_facts(folder)["exit_code"] == 0


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_gives_one_checkpoint_and_a_way_on(toy: Toy, tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    process = run_until_step(toy, folder, 2, **LONG, checkpoint__interval_steps=1000)
    process.send_signal(number)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 75, output
    assert output.count("a checkpoint is saved") == output.count("stopped: ") == 1
    (saved,) = (folder / "checkpoints").iterdir()
    facts = stop_facts(folder)
    assert (facts["cause"], facts["exit_code"], facts["requeue"]) == (number.name, 75, True)
    assert saved.name == f"step_{facts['step']:08d}"


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_before_the_ranks_are_there_is_written_down(toy: Toy, tmp_path: Path, number: signal.Signals) -> None:
    """While the server imports, when the run has no folder yet."""
    folder = tmp_path / "run"
    process = start("pretrain", *toy.settings(folder, **TWO), "--nproc", 2, fresh=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text():
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    cause = f"{number.name} came before all ranks were started."
    assert output == f"{cause} Start the same command again to go on.\n"
    assert stop_facts(folder) == {"cause": cause, "step": 0, "exit_code": 75, "requeue": True, "resume": None}


def test_what_is_wrong_is_said_once_and_nothing_starts(
    toy: Toy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    output = lmtrain("pretrain", *toy.settings(folder), "optim.lrr=1", "--nproc", 2, code=2)
    assert output.count("optim.lrr=1 is not a setting. Did you mean optim.lr=1?") == 1
    assert capfd.readouterr() == ("", ""), "a process that was started has spoken"
    assert not folder.exists()


def test_as_many_processes_as_the_layout_has(toy: Toy, tmp_path: Path) -> None:
    settings = toy.settings(tmp_path / "run")
    assert "--nproc 2" in lmtrain("pretrain", *settings, "parallel.tp=2", code=78)
    assert "3 processes were started" in lmtrain("pretrain", *settings, "parallel.tp=2", "--nproc", 3, code=78)
    assert "2 processes were started" in lmtrain("pretrain", *settings, "--nproc", 2, code=78)
    assert not (tmp_path / "run").exists()


def test_a_launcher_within_a_launcher_is_refused(toy: Toy, tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for option in ("--nproc", "--nproc-per-node"):
        output = lmtrain("pretrain", *toy.settings(tmp_path / "run", **TWO), option, 2, code=2, env=env)
        assert f"{option}=2 would start 2 processes from each process that torchrun has started" in output


def test_the_number_of_processes_is_said_once(toy: Toy, tmp_path: Path) -> None:
    evaluation = ["eval", tmp_path, "--task", "perplexity", "--data", next(toy.text.iterdir())]
    for words in (["pretrain", *toy.settings(tmp_path / "run")], evaluation):
        output = lmtrain(*words, "--nproc", 2, "--nproc-per-node", 2, code=2)
        assert "--nproc=2 and --nproc-per-node=2 both say how many processes to start. Give --nproc on" in output


def test_another_rank_says_who_it_is(toy: Toy, tmp_path: Path) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run"), "optim.lrr=1", code=2, env=env)
    assert output.startswith(f"error: rank 1 on {os.uname().nodename}: ")


@pytest.mark.parametrize("option", ["--nproc", *wide("--nproc-per-node")])
def test_a_dry_run_starts_nothing(toy: Toy, tmp_path: Path, option: str) -> None:
    facts = json.loads(
        lmtrain("pretrain", *toy.settings(tmp_path / "run", **TWO), option, 2, "--dry-run", "--json")
    )  # fmt: skip
    assert len(facts["ranks"]) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
def test_torchrun_starts_the_package(toy: Toy, tmp_path: Path) -> None:
    """`torchrun -m lmtrain`: for machines where the script is not on the path of every process."""
    settings = toy.settings(tmp_path / "run", train__steps=2, schedule__warmup_steps=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lmtrain"]
    done = subprocess.run(
        [*command, "pretrain", *settings, "parallel.dp_shard=2"], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stdout
    assert json.loads((tmp_path / "run/stop.json").read_text())["cause"] == "done"


@pytest.mark.wide
@pytest.mark.parametrize("layout", [*slow({"parallel__tp": 2}), {"parallel__dp_shard": 2, "optim": "lamb"}])
def test_what_ranks_need_is_imported_before_they_are_forked(toy: Toy, tmp_path: Path, layout: dict[str, Any]) -> None:
    process = start("pretrain", *toy.settings(tmp_path / "run", **layout), "--nproc", 2, env=SAYS_IMPORTS)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert len(imported_by_rank_1(output)) < 20, imported_by_rank_1(output)
    words = ["eval", tmp_path / "run", "--task", "perplexity", "--data", toy.text / "page_003.txt", "parallel.tp=2"]
    process = start(*words, "--nproc", 2, env=SAYS_IMPORTS)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert len(imported_by_rank_1(output)) < 20, imported_by_rank_1(output)


SAYS_IMPORTS = {"PYTHONPROFILEIMPORTTIME": "1"}


def imported_by_rank_1(output: str) -> list[str]:
    return re.findall(r"\[rank 1\] import time: [^|]*\|[^|]*\|\s*(\S+)", output)
