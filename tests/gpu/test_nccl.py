"""Several ranks on one GPU, talking by NCCL: the layouts equal one process there as well, for long, and end together.

How NCCL is brought to it stands in tests/layouts/worker.py; it is for tests, as ranks then share one GPU's memory and
time. The bodies are those of tests/layouts, which run on the CPU; what is tested here alone is tested there too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layouts.arrays import stored
from tests.layouts.cases import Case, summing
from tests.layouts.outcome import LONG_LOSS, References, check, run
from tests.layouts.test_pipelines import TIED
from tests.layouts.test_pipelines import test_tied_copies_stay_one as tied_copies_stay_one
from tests.layouts.workers import Pool
from tests.marks import wide

_PAIRS = [case for name in ("pairs", "pipeline_pairs") for case in stored(name) if case.num_processes in (2, 4)]
PAIRS = [*_PAIRS, *summing(_PAIRS)]  # those that sum take a GPU's own ways: its products and the kernels
STEPS, SOME = 200, 20
LONG = [
    "deep-pp2-vp2-interleaved-dp1-fp32-micro4",
    "deepgqa-pp2-zb_h1-dp1-fp32-micro5",
    "deep-pp2-vp2-zb_v-dp1-fp32-micro4",
    "deepuntied-pp4-zb_h1-dp1-fp32-micro8",
    "tied-tp2-dp2-zero1-sp-fp32-micro1",
]


@pytest.fixture
def pool_there(device: torch.device, pools: dict[str, Pool]) -> Pool:
    return pools[device.type]


@pytest.fixture(scope="session")
def references_there(pools: dict[str, Pool]) -> dict[str, References]:
    """One process of each device."""
    return {name: References(pool) for name, pool in pools.items()}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{case.num_processes}ranks-{case.name}", marks=pytest.mark.wide) for case in PAIRS],
)
def test_a_layout_equals_one_process(
    case: Case, gpu: torch.device, pools: dict[str, Pool], references_there: dict[str, References]
) -> None:
    """On a CPU tests/layouts has all of these."""
    wrong = check(case, run(pools[gpu.type], case), references_there[gpu.type])
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_pipelines_neither_stop_nor_drift(
    name: str, device: torch.device, pool_there: Pool, references_there: dict[str, References]
) -> None:
    case = Case.named(name)
    found, one = run(pool_there, case, steps=STEPS), references_there[device.type].of(case, STEPS)
    assert not found.quarrels
    assert [leaked_bytes(held) for held in found.held_bytes] == [0] * case.num_processes
    assert one.losses[-1] < 0.96 * one.losses[0], "the reference must learn, or the comparison says little"
    apart = [abs(a - b) / b for a, b in zip(found.losses, one.losses, strict=True)]
    assert max(apart) <= LONG_LOSS, f"step {apart.index(max(apart))} is off by {max(apart):.1e}"


def leaked_bytes(held_bytes: list[int]) -> int:
    """How much more is held after each of the last steps than after any of the first."""
    return max(0, min(held_bytes[-SOME:]) - max(held_bytes[:SOME]))


def test_a_leak_is_told_from_what_comes_and_goes() -> None:
    waves = [1024 + 512 * (step % 3) for step in range(STEPS)]
    assert leaked_bytes(waves) == 0
    assert leaked_bytes([held + 8 * step for step, held in enumerate(waves)]) > 0


@pytest.mark.parametrize("name", wide(*TIED))
def test_tied_copies_stay_one(
    name: str, gpu: torch.device, pools: dict[str, Pool], references_there: dict[str, References]
) -> None:
    tied_copies_stay_one(name, pools[gpu.type], references_there[gpu.type])


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_loss_of_a_rank_ends_the_other(number: int, device: torch.device, tmp_path: Path) -> None:
    """With 76 and its name; within 5 s where it waits on a GPU, of which a CPU's own way out knows nothing."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.lost", str(rank), str(tmp_path), str(device)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    read: Any = [rank.stdout for rank in ranks]
    for stream in read:
        assert stream.readline().strip() == "100"
    ranks[1].send_signal(number)
    ranks[1].wait()
    since = time.monotonic()
    said = read[0].read()
    code, took_s = ranks[0].wait(), time.monotonic() - since
    for stream in read:
        stream.close()
    assert code == 76, said
    assert "error: rank 1 on here" in said
    if device.type == "cuda":
        assert took_s < 5
