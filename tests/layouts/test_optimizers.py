"""On identical gradients every optimizer makes the updates of one process, whatever it sees of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from tests.layouts.cases import Case
from tests.layouts.outcome import assemble
from tests.layouts.workers import Pool
from tests.marks import slow, wide

# because: fp32 sums over shards come in another order, and Muon orthogonalises what it has gathered
TOLERANCE = 1e-5


def updated(pool: Pool, name: str, optim: str, folder: Path) -> Iterator[dict[str, Tensor]]:
    """Whole weights before and after."""
    folders = [folder / "before", folder / "after"]
    for one in folders:
        one.mkdir(parents=True)
    arguments = {"name": name, "optim": optim, "before": str(folders[0]), "after": str(folders[1])}
    ranks = pool.run("tests.layouts.updates:update", Case.named(name).num_processes, arguments)
    for pieces, one in zip(zip(*ranks, strict=True), folders, strict=True):
        weights, quarrels = assemble([*pieces], one)
        assert not quarrels
        yield weights


@pytest.mark.parametrize("optim", ["muon", *wide("lamb"), *slow("adamw")])  # AdamW is in every case of the arrays
@pytest.mark.parametrize(
    "name",
    [
        "tied-tp2-dp2-zero0-fp32-micro1",
        *wide(
            "tied-dp8-zero1-fp32-micro1",
            "untied-tp2-dp3-zero2-sp-fp32-micro1",
            "gqa-tp2-dp4-zero3-hybrid-sp-fp32-micro1",
            "deep-pp2-tp2-dp2-zero1-sp-fp32-micro4",
            "deep-pp2-vp2-zb_v-dp2-zero2-fp32-micro4",
        ),
        *slow(
            "parallel-tp8-dp1-fp32-micro1",
            "deepgqa-pp4-dp2-zero3-fp32-micro4",
            "deeppost-pp2-vp2-interleaved-tp2-dp1-fp32-micro4",
        ),
    ],
)
def test_updates_are_those_of_one_process(name: str, optim: str, pool: Pool, tmp_path: Path) -> None:
    one = Case.named(name).reference.name
    start, right = updated(pool, one, optim, tmp_path / "one")
    _, found = updated(pool, name, optim, tmp_path / "found")
    for key, weight in right.items():
        moved = (weight - start[key]).norm()
        assert moved > 0
        assert (found[key] - weight).norm() <= TOLERANCE * moved, key
