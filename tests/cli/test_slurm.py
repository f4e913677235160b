"""A real Slurm with two nodes, where there is one: srun gives the losses of one process, and one end for all tasks."""

from __future__ import annotations

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


def srun(*arguments: object, tasks: int = 2, env: dict[str, str] | None = None) -> tuple[int, str]:
    command = ["srun", "--nodes=2", f"--ntasks-per-node={tasks}", "--kill-on-bad-exit=1"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "lmtrain.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", **(env or {})},
    )  # fmt: skip
    return done.returncode, done.stdout


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


def test_two_nodes_with_two_tasks_train_as_one_process(toy: Toy, tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "one"))
    code, output = srun("pretrain", *toy.settings(tmp_path / "four", **FOUR))
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
    code, output = srun("pretrain", *words, *maker.settings(tmp_path / "eight", **sizes, **EIGHT), tasks=4)
    assert code == 0, output
    assert output.count("done: 12 steps") == 1
    assert re.search(r"^0-3 +n1 +0 .*\n4-7 +n2 +1 ", output, re.MULTILINE)
    assert losses(tmp_path / "eight") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_task_that_dies_ends_the_step(toy: Toy, tmp_path: Path) -> None:
    fault = {"LMTRAIN_FAULT": "kill:point=step:step=5:rank=3", "LMTRAIN_ALLOW_FAULTS": "1"}
    code, output = srun("pretrain", *toy.settings(tmp_path / "run", **FOUR), env=fault)
    assert code != 0
    # it had no time to speak itself, and its parent may have been quicker to ask how it ended
    ended = r"error: rank 3 on n2 (was ended by SIGKILL|ended without a word.*): it was in data of step 6"
    assert len(re.findall(ended, output)) == 1, output
    assert "Killed" in output


def test_a_tensor_parallel_group_over_two_nodes_says_that_it_is_one(toy: Toy, tmp_path: Path) -> None:
    settings = toy.settings(tmp_path / "run", model__num_heads=4, parallel__tp=4)
    code, output = srun("pretrain", *settings)
    assert code == 0, output
    assert "parallel.tp=4 goes across nodes, as n1 has 2 processes" in output
