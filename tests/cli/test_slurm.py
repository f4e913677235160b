"""A real Slurm with two nodes, where there is one: srun gives the losses of one process, and one end for all tasks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain
from tests.cli.two_nodes import need_two_nodes

FOUR: dict[str, Any] = {"parallel__tp": 2, "parallel__dp_shard": 2, "parallel__timeout_s": 60}
EIGHT: dict[str, Any] = FOUR | {"parallel__pp": 2, "parallel__timeout_s": 120}


@pytest.fixture(scope="module", autouse=True)
def _two_nodes() -> None:
    need_two_nodes()


WAYS = ("node", "rank")  # what a task of srun is
ON_N2 = 'if [ "$SLURMD_NODENAME" = n2 ]; then exec "${{@/#{}=*/{}}}"; else exec "$@"; fi'


def srun(
    *arguments: object, ranks: int = 2, way: str = "node", on_n2: str = "", env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Start so many ranks on each of two nodes; `on_n2` is a setting that is another on the second."""
    command = ["srun", "--nodes=2", "--kill-on-bad-exit=1", f"--ntasks-per-node={ranks if way == 'rank' else 1}"]
    words = [*map(str, arguments)]
    if way == "node":
        command, words = [*command, f"--cpus-per-task={ranks}"], [*words, f"--nproc-per-node={ranks}"]
    changed = ON_N2.format(on_n2.partition("=")[0] or "none", on_n2)
    done = subprocess.run(
        [*command, "bash", "-c", changed, "bash", sys.executable, "-m", "lmtrain", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", **(env or {})},
    )  # fmt: skip
    return done.returncode, done.stdout


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


@pytest.mark.parametrize("way", WAYS)
def test_two_nodes_with_two_ranks_train_as_one_process(toy: Toy, tmp_path: Path, way: str) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "one"))
    code, output = srun("pretrain", *toy.settings(tmp_path / "four", **FOUR), way=way)
    assert code == 0, output
    assert output.count("done: 12 steps") == 1
    assert "2 hosts" in output
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_a_pipeline_over_two_nodes_trains_as_one_process(kind: str, toy: Toy, sentences: Toy, tmp_path: Path) -> None:
    """Stages on a node each, with two tensor-parallel copies of two processes in it."""
    maker, words = (toy, []) if kind == "gpt" else (sentences, ["model=bert_tiny", "data=masked"])
    sizes: dict[str, Any] = {"train__micro_batch": 1}
    lmtrain("pretrain", *words, *maker.settings(tmp_path / "one", **sizes))
    code, output = srun("pretrain", *words, *maker.settings(tmp_path / "eight", **sizes, **EIGHT), ranks=4)
    assert code == 0, output
    assert output.count("done: 12 steps") == 1
    assert re.search(r"^0-3 +n1 +0 .*\n4-7 +n2 +1 ", output, re.MULTILINE)
    assert losses(tmp_path / "eight") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize(("way", "srun_says"), [("node", "n2: task 1: Exited with exit code 137"),
                                                ("rank", "n2: task 3: Killed")])  # fmt: skip
def test_a_rank_that_dies_ends_the_step(toy: Toy, tmp_path: Path, way: str, srun_says: str) -> None:
    fault = {"LMTRAIN_FAULT": "kill:point=step:step=5:rank=3", "LMTRAIN_ALLOW_FAULTS": "1"}
    code, output = srun("pretrain", *toy.settings(tmp_path / "run", **FOUR), way=way, env=fault)
    assert code != 0
    # it had no time to speak itself, and its parent may have been quicker to ask how it ended
    ended = r"error: rank 3 on n2 (was ended by SIGKILL|ended without a word.*): it was in data of step 6"
    assert len(re.findall(ended, output)) == 1, output
    assert srun_says in output


def test_a_rank_that_dies_before_it_meets_the_others_is_named_with_its_node(toy: Toy, tmp_path: Path) -> None:
    """Nobody watches it yet; its launcher says it, writes it down, and does not wait for the other node."""
    fault = {"LMTRAIN_FAULT": "kill:point=start.imports:rank=2", "LMTRAIN_ALLOW_FAULTS": "1"}
    lmtrain("pretrain", *toy.settings(tmp_path / "run"))  # because: stop.json of an earlier start has to give way
    code, output = srun("pretrain", *toy.settings(tmp_path / "run", **FOUR, train__steps=20), env=fault)
    assert code != 0
    assert output.count("error: rank 2 on n2 was ended by SIGKILL, and the run with it") == 1, output
    assert "n2: task 1: Exited with exit code 137" in output
    stop = json.loads((tmp_path / "run" / "stop.json").read_text())
    assert (stop["rank"], stop["lost"], stop["exit_code"]) == (2, 2, 76)


def test_a_node_that_lacks_the_data_says_so_once_and_the_other_does_not_wait(toy: Toy, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    code, output = srun("pretrain", *toy.settings(tmp_path / "run", **FOUR), on_n2=f"data.path={gone}")
    assert code == 66, output
    said = [line for line in output.splitlines() if "gone.idx does not exist" in line]
    assert len(said) == 2, output
    assert any(line.startswith("error: node n2: ") for line in said)
    assert any(line.startswith("error: No process starts, because node n2 cannot start: ") for line in said)
    assert "waited" not in output


def test_what_all_nodes_would_say_is_said_once(toy: Toy, tmp_path: Path) -> None:
    """A sweep of two runs, then what they would be; and ranks that differ."""
    words = ["pretrain", "-m", *toy.settings(tmp_path / "sweep", **FOUR | {"train__seed": "1,2", "train__steps": 4})]
    code, output = srun(*words)
    assert code == 0, output
    assert output.count("run 1 of 2: ") == output.count("run 2 of 2: ") == 1
    assert output.count("done: 4 steps") == 2
    words = ["pretrain", *toy.settings(tmp_path / "run", **FOUR), "parallel=auto", "hardware=cpu"]
    code, output = srun(*words, "--dry-run", "--json")
    assert code == 0, output
    preview = "".join(line for line in output.splitlines() if line.startswith(("{", " ", "}")))
    assert len(json.loads(preview)["ranks"]) == 4
    assert output.count("parallel=auto: ") == 1
    code, output = srun("pretrain", *toy.settings(tmp_path / "run", **FOUR), on_n2="optim.lr=1e-4")
    assert code == 2, output
    [said] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: The ranks of this run differ: optim.lr is")


def test_a_tensor_parallel_group_over_two_nodes_says_that_it_is_one(toy: Toy, tmp_path: Path) -> None:
    settings = toy.settings(tmp_path / "run", model__num_heads=4, parallel__tp=4)
    code, output = srun("pretrain", *settings)
    assert code == 0, output
    assert "parallel.tp=4 goes across nodes, as n1 has 2 processes" in output
