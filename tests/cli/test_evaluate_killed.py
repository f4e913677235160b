"""`lmtrain eval` killed at random instants and started again: the same digits, and nothing is scored twice."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Toy, lmtrain, start

KILLED = -9
BATCHES = 27  # of 53 lines, two at a time


def results(document: dict[str, Any]) -> list[dict[str, Any]]:
    """All but the time that it took."""
    return [{k: v for k, v in one.items() if k not in ("seconds", "tokens_per_s")} for one in document["results"]]


@pytest.mark.wide
def test_killed_at_five_instants_and_started_again(toy: Toy, tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "run", train__steps=4))
    lines = [{"text": f"the {number} lines of a text and its {'long ' * (number % 7)}end"} for number in range(53)]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["eval", tmp_path / "run", "--task", "lambada/megatron-strict", "--data", tmp_path / "l.jsonl"]
    command += ["--batch-size", 2, "--device", "cpu"]
    lmtrain(*command, "--output", tmp_path / "unbroken.json", env={"OMP_NUM_THREADS": "1"})

    def begun(point: str, count: int) -> int:
        """The same command, to be killed when it passes the point for so many a time."""
        fault = {"LMTRAIN_FAULT": f"kill:point={point}:count={count}", "LMTRAIN_ALLOW_FAULTS": "1"}
        process = start(*command, "--output", tmp_path / "r.json", env=fault)
        process.communicate(timeout=300)
        return process.returncode

    left = BATCHES
    for _ in range(5):
        point, count = random.choice(["eval.batch", "eval.journal"]), random.randint(2, 5)
        assert begun(point, count) == KILLED
        left -= count - 1  # the last batch before the kill was not on disk
    assert not (tmp_path / "r.json").exists()
    # exactly the batches that are left are scored: at one more nothing strikes
    assert begun("eval.batch", left) == KILLED
    assert begun("eval.batch", 2) == 0
    assert results(json.loads((tmp_path / "r.json").read_text())) == results(
        json.loads((tmp_path / "unbroken.json").read_text())
    )
    assert sorted(path.name for path in tmp_path.glob("r.json*")) == ["r.json"]
