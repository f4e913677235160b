"""A process that stands still, or is gone, is named with its phase and step; all end with 76 and nothing is left."""

from __future__ import annotations

import json
import os
import re
import select
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Toy, start
from tests.marks import slow

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc"),
]
DP, TP, PP = {"parallel__dp_shard": 2}, {"parallel__tp": 2}, {"parallel__pp": 2}


def run_with(fault: str, toy: Toy, folder: Path, **settings: Any) -> tuple[int, str]:
    """A run of two processes that would take 200 steps, with a fault at the eighth."""
    allowed = {"LMTRAIN_FAULT": fault, "LMTRAIN_ALLOW_FAULTS": "1"}
    process = start("pretrain", *toy.settings(folder, train__steps=200, **settings), "--nproc", 2, env=allowed)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def left_behind(folder: Path) -> list[bytes]:
    """Processes of this run, companions too, once those that are about to end have had the time."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            if str(folder).encode() not in command or int(path.parent.name) == os.getpid():
                continue
            ended = os.pidfd_open(int(path.parent.name))
        except OSError:
            continue
        if not select.select([ended], [], [], 60.0)[0]:
            found.append(command)
        os.close(ended)
    return found


def facts(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "stop.json").read_text()))


@pytest.mark.parametrize(
    ("fault", "rank", "place", "layout"),
    [
        ("gil:point=forward:step=7:rank=1", 1, "forward of step 8, microbatch 0, stage 1, ", PP),
        ("skip:point=collective:step=7:rank=1", 1, "collective .* left out a collective: in step 8 it went on to ", DP),
        *slow(
            ("loop:point=ckpt.mid_write:rank=1", 1, "save of step 4, ", DP),
            ("stop:point=backward:step=7:rank=0", 0, "backward of step 8, microbatch 0, stage 0, .* is stopped by", DP),
            ("stop:point=start.build:rank=1", 1, "build, ", TP),
            ("stop:point=data.next:step=7:rank=1", 1, "", TP),
            ("loop:point=backward:step=7:rank=1", 1, "backward of step 8, microbatch 0, stage 0, ", DP),
            ("gil:point=forward:step=7:rank=0", 0, "forward of step 8, microbatch 0, stage 0, ", TP),
        ),
    ],
)
def test_the_one_that_stands_still_is_named(
    toy: Toy, tmp_path: Path, fault: str, rank: int, place: str, layout: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    code, output = run_with(fault, toy, folder, parallel__timeout_s=15, **layout)
    assert code == 76, output
    assert re.search(rf"error: rank {rank} on \S+ has been in {place}", output), output
    assert "was ended by SIGKILL" not in output
    found = facts(folder)
    assert (found["exit_code"], found["requeue"], found["rank"]) == (76, True, rank)
    (stacks,) = (folder / "hangs").iterdir()
    assert found["hang"] == str(stacks)
    assert str(stacks) in found["cause"]
    assert found["cause"] in output
    for each in range(2):
        assert "most recent call first" in (stacks / f"rank_{each:05d}.txt").read_text()
    assert f"rank {rank} on" in (stacks / "summary.txt").read_text()
    assert left_behind(folder) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_process_is_named_by_those_it_leaves(toy: Toy, tmp_path: Path, rank: int) -> None:
    folder = tmp_path / "run"
    code, output = run_with(f"kill:point=backward:step=7:rank={rank}", toy, folder, **DP)
    assert code == 76, output
    assert re.search(
        rf"error: rank {rank} on \S+ (was ended by SIGKILL|ended without a word.*): it was in backward of step 8, "
        "microbatch 0, stage 0\\.", output
    )  # fmt: skip
    assert output.count(f"error: rank {rank}") == 1  # by the watch, and not by the launcher again
    assert facts(folder)["rank"] == rank
    assert not (folder / "hangs").exists()
    assert left_behind(folder) == []


def test_an_error_of_one_is_what_the_others_say(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, output = run_with("exc:point=backward:step=7:rank=1", toy, folder, **DP)
    assert code == 1, output
    assert re.search(r"error: rank 1 on \S+ ended in backward of step 8, .*: RuntimeError: fault at backward\.", output)
    assert left_behind(folder) == []


def test_a_healthy_run_teaches_the_next_and_leaves_nothing(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("pretrain", *toy.settings(folder, **DP), "--nproc", 2)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    times = json.loads((folder / "phase_times.json").read_text())
    assert times["processes"] == 2
    assert {"build", "forward", "backward", "optimizer", "save", "losses"} <= set(times["longest_s"])
    assert not (folder / "hangs").exists()
    assert left_behind(folder) == []
