"""Dropout in pipelines: no mask ever comes twice, recompute draws the same again, and so does a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts.cases import Case
from tests.layouts.workers import Pool

STEPS = 2
Mask = tuple[int, int, str]  # step, number of the microbatch among all copies', module


def drawn(pool: Pool, name: str, bug: str | None = None) -> list[dict[Mask, set[str]]]:
    """Of each tp rank: the masks that all its stages and copies drew, by where they were drawn."""
    case = Case.named(name)
    arguments = {"name": name, "steps": STEPS, "bug": bug}
    found: list[dict[Mask, set[str]]] = [{} for _ in range(case.tp)]
    for rank in pool.run("tests.layouts.masks:masks", case.num_processes, arguments):
        for step, number, path, digest in rank["masks"]:
            found[rank["tp"]].setdefault((step, number, path), set()).add(digest)
    return found


def num_repeated(found: dict[Mask, set[str]]) -> int:
    """How many masks are that of another place, or are not one."""
    digests = [digest for one in found.values() for digest in one]
    return len(digests) - len(set(digests)) + sum(len(one) > 1 for one in found.values())


@pytest.mark.wide
@pytest.mark.parametrize(
    "words",
    [
        "pp2-vp2-zb_v-tp1-dp1",
        "pp4-tp1-dp2-zero1-full",
        "pp2-vp2-interleaved-tp2-dp2-zero1",
        "pp2-vp2-interleaved-tp2-dp2-zero1-sp-full",
    ],
)
def test_no_mask_comes_twice(words: str, pool: Pool) -> None:
    """Over steps, microbatches, copies, stages and layers; over tp where ranks hold different numbers."""
    name = f"deep-{words}-fp32-micro4-dropout"
    case = Case.named(name)
    found = drawn(pool, name)
    layers = case.model_settings.shape.num_layers
    for one in found:
        assert len(one) == STEPS * 4 * case.dp * (1 + 3 * layers)
        assert num_repeated(one) == 0
    if case.tp > 1:
        for place, mask in found[0].items():
            apart = case.sequence or place[2].endswith(".core")
            assert (found[1][place] != mask) is apart, place


@pytest.mark.wide
@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("dropout_repeated_over_microbatches", "pp2-vp2-interleaved-dp1"),
        ("dropout_repeated_over_stages", "pp2-vp2-interleaved-dp1"),
        ("dropout_repeated_under_recompute", "pp2-tp2-dp1-full"),
    ],
)
def test_a_repeated_mask_is_noticed(bug: str, words: str, pool: Pool) -> None:
    name = f"deep-{words}-fp32-micro4-dropout"
    assert not any(map(num_repeated, drawn(pool, name)))
    assert any(map(num_repeated, drawn(pool, name, bug)))


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [
        "deep-pp2-vp2-interleaved-tp2-dp1-fp32-micro4-dropout",
        "deepbert-pp2-zb_h1-dp2-zero2-bf16-micro4-dropout",
        "deepgqa-pp4-dp2-zero3-full-fp32-micro4-dropout",
    ],
)
def test_a_resumed_pipeline_draws_what_an_unbroken_one_does(name: str, pool: Pool, tmp_path: Path) -> None:
    """Losses and norms are the same to the last bit."""
    num_processes = Case.named(name).num_processes
    arguments = {
        "name": name, "folder": str(tmp_path), "steps": 4, "where": "", "overflow_step": -1, "overflow_rank": -1,
        "save_step": 2,
    }  # fmt: skip
    unbroken = pool.run("tests.layouts.overflow:train", num_processes, arguments)
    arguments = {"name": name, "folder": str(tmp_path), "start": 2, "stop": 4}
    for rank, resumed in enumerate(pool.run("tests.layouts.overflow:resume", num_processes, arguments)):
        assert resumed == unbroken[rank][2:]
