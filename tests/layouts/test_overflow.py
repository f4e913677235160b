"""fp16: an overflow on one rank skips the step on all and halves the scale everywhere; a resumed run keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.layouts.cases import Case
from tests.layouts.workers import Pool
from tests.marks import slow

LOSS, NORM, SKIPPED, SCALE, MOVED = range(5)
STEPS, OVERFLOW_STEP, SAVE_STEP = 5, 1, 3


def train(pool: Pool, name: str, folder: Path, where: str, rank: int) -> list[list[list[Any]]]:
    arguments = {
        "name": name, "folder": str(folder), "steps": STEPS, "where": where, "overflow_step": OVERFLOW_STEP,
        "overflow_rank": rank, "save_step": SAVE_STEP,
    }  # fmt: skip
    return pool.run("tests.layouts.overflow:train", Case.named(name).num_processes, arguments)


@pytest.mark.wide
@pytest.mark.parametrize("where", ["one_shard", "activations"])
@pytest.mark.parametrize(
    "name",
    ["tied-tp2-dp2-zero1-fp16-micro1", "gqa-tp2-dp2-zero3-sp-fp16-micro4", "untied-tp2-dp2-zero0-sp-fp16-micro1"],
)
def test_all_ranks_skip_what_one_overflows(name: str, where: str, pool: Pool, tmp_path: Path) -> None:
    check_skip(train(pool, name, tmp_path, where, rank=2))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("rank", "where"), [(0, "activations"), (3, "one_shard"), *slow((0, "one_shard"), (3, "activations"))]
)
@pytest.mark.parametrize(
    "name",
    [
        "deep-pp2-dp2-zero1-fp16-micro4", "deepgqa-pp2-vp2-interleaved-tp2-dp1-sp-fp16-micro4",
        "deepbert-pp2-zb_h1-dp2-zero2-fp16-micro4",
    ],
)
def test_all_stages_skip_what_one_overflows(name: str, rank: int, where: str, pool: Pool, tmp_path: Path) -> None:
    check_skip(train(pool, name, tmp_path, where, rank))


def check_skip(ranks: list[list[list[Any]]]) -> None:
    assert ranks.count(ranks[0]) == 4, "all ranks tell the same"
    steps = ranks[0]
    assert [row[SKIPPED] for row in steps] == [step == OVERFLOW_STEP for step in range(STEPS)]
    assert [row[MOVED] for row in steps] == [step != OVERFLOW_STEP for step in range(STEPS)]
    assert [row[SCALE] for row in steps] == [1024.0, 512.0, 512.0, 512.0, 512.0]
    assert steps[OVERFLOW_STEP][NORM] in ("inf", "nan")
    assert steps[-1][LOSS] < steps[0][LOSS]


@pytest.mark.wide
@pytest.mark.parametrize("name", ["tied-tp2-dp2-zero1-fp16-micro1", "deep-pp2-dp2-zero1-fp16-micro4"])
def test_a_resumed_run_keeps_the_scale(name: str, pool: Pool, tmp_path: Path) -> None:
    unbroken = train(pool, name, tmp_path, "one_shard", rank=3)[0]
    arguments = {"name": name, "folder": str(tmp_path), "start": SAVE_STEP, "stop": STEPS}
    for resumed in pool.run("tests.layouts.overflow:resume", 4, arguments):
        assert resumed == unbroken[SAVE_STEP:], "losses, norms and scale to the last bit"


@pytest.mark.wide
def test_another_layout_resumes_with_the_scale(pool: Pool, tmp_path: Path) -> None:
    unbroken = train(pool, "tied-tp2-dp2-zero1-fp16-micro1", tmp_path, "one_shard", rank=0)[0]
    arguments = {"name": "tied-dp3-zero3-fp16-micro1", "folder": str(tmp_path), "start": SAVE_STEP, "stop": STEPS}
    for resumed in pool.run("tests.layouts.overflow:resume", 3, arguments):
        assert [row[SCALE] for row in resumed] == [row[SCALE] for row in unbroken[SAVE_STEP:]]
        assert [row[LOSS] for row in resumed] == pytest.approx([row[LOSS] for row in unbroken[SAVE_STEP:]], rel=1e-3)
