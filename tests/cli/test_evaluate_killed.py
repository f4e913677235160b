"""`lmtrain eval` killed at random instants and started again: the same digits, and nothing is scored twice."""

from __future__ import annotations

import json
import os
import random
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import pytest

from lmtrain.eval.resume_journal import _record_ranges
from tests.cli.harness import Toy, lmtrain, start

KILLED = -9
BATCHES = 27  # of 53 lines, two at a time


class Call:
    """One command, that can be begun again and again."""

    def __init__(self, toy: Toy, folder: Path, *more: object, lines: int = 53) -> None:
        lmtrain("pretrain", *toy.settings(folder / "run", train__steps=4))
        words = ("long", "lines", "of", "a", "text", "file")  # in any order as many tokens: no two share a row
        rows = [{"text": f"the {' '.join(some)}"} for some in islice(permutations(words), lines)]
        (folder / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["eval", folder / "run", *more, "--task", "lambada/megatron-strict", "--data", folder / "l.jsonl"]
        self.command = [*command, "--batch-size", 2, "--device", "cpu"]
        self.folder, self.output, self.journal = folder, folder / "r.json", folder / "r.json.journal"

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

    def killed_behind(self, num_batches: int) -> bytes:
        """SIGKILL from outside once so many batches are in the journal, whatever the process is doing then; what it
        left."""
        process = start(*self.command, "--output", self.output)
        while process.poll() is None and len(self.batches()) < num_batches:
            os.sched_yield()
        process.kill()
        said = process.communicate(timeout=300)[0]
        assert process.returncode == KILLED, said
        return self.journal.read_bytes()

    def batches(self) -> list[tuple[int, int]]:
        return _record_ranges(self.journal.read_bytes()) if self.journal.exists() else []


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_from_outside_at_five_random_instants(toy: Toy, tmp_path: Path, seed: int) -> None:
    call, draws, kept = Call(toy, tmp_path, lines=720), random.Random(seed), b""
    for _ in range(5):
        left = call.killed_behind(len(call.batches()) + draws.randint(1, 30))
        assert left.startswith(kept)
        kept = left[: call.batches()[-1][1]]
    assert call.begun("eval.batch", 720 // 2 - len(call.batches()) + 1)[0] == 0  # one batch more would have struck
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
