"""`lmtrain eval` killed at random instants and started again: the same digits, and nothing is scored twice."""

from __future__ import annotations

import json
import random
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Toy, lmtrain, start

KILLED = -9
BATCHES = 27  # of 53 lines, two at a time


class Call:
    """One command, that can be begun again and again."""

    def __init__(self, toy: Toy, folder: Path, *more: object) -> None:
        lmtrain("pretrain", *toy.settings(folder / "run", train__steps=4))
        words = ("long", "lines", "of", "a", "text")  # in any order as many tokens, so that no two share a row
        lines = [{"text": f"the {' '.join(some)}"} for some in islice(permutations(words), 53)]
        (folder / "l.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = ["eval", folder / "run", *more, "--task", "lambada/megatron-strict", "--data", folder / "l.jsonl"]
        self.command = [*command, "--batch-size", 2, "--device", "cpu"]
        self.folder, self.output = folder, folder / "r.json"

    def unbroken(self) -> list[dict[str, Any]]:
        process = start(*self.command, "--output", self.folder / "unbroken.json")
        process.communicate(timeout=300)
        return results(self.folder / "unbroken.json")

    def begun(self, point: str, count: int) -> tuple[int, str]:
        """To be killed when the first process passes the point for so many a time."""
        fault = {"LMTRAIN_FAULT": f"kill:point={point}:count={count}:rank=0", "LMTRAIN_ALLOW_FAULTS": "1"}
        process = start(*self.command, "--output", self.output, env=fault)
        said = process.communicate(timeout=300)[0]
        return process.returncode, said


def results(path: Path) -> list[dict[str, Any]]:
    """All but the time that it took."""
    found = json.loads(path.read_text())["results"]
    return [{k: v for k, v in one.items() if k not in ("seconds", "tokens_per_s")} for one in found]


@pytest.mark.wide
def test_killed_at_five_instants_and_started_again(toy: Toy, tmp_path: Path) -> None:
    call = Call(toy, tmp_path)
    left = BATCHES
    for _ in range(5):
        point, count = random.choice(["eval.batch", "eval.journal"]), random.randint(2, 5)
        assert call.begun(point, count)[0] == KILLED
        left -= count - 1  # the last batch before the kill was not on disk
    assert not call.output.exists()
    # exactly the batches that are left are scored: at one more nothing strikes
    assert call.begun("eval.batch", left)[0] == KILLED
    assert call.begun("eval.batch", 2)[0] == 0
    assert results(call.output) == call.unbroken()
    assert sorted(path.name for path in tmp_path.glob("r.json*")) == ["r.json"]


@pytest.mark.wide
def test_several_processes_go_on_from_one_journal(toy: Toy, tmp_path: Path) -> None:
    call = Call(toy, tmp_path, "parallel.tp=2", "--nproc", 4)
    assert call.begun("eval.batch", 12)[0] != 0
    code, said = call.begun("eval.batch", BATCHES - 8 + 1)  # two copies: at most the last two batches are done again
    assert code == 0, said
    assert said.count("not scored again") == 1
    assert results(call.output) == call.unbroken()
    (result,) = results(call.output)
    assert "tp 2" in result["layout"] or "tp=2" in result["layout"]
