"""Trained at A, gone on with at B: bit for bit the same weights and optimizer, then the losses of the unbroken run.

For every ordered pair of layouts, through real runs with folders. That `lmtrain reshard` gives the same bits between
files, with no process that trains, is what tests/unit/checkpoint/reshard/test_run.py shows of these and more layouts.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layouts.cases import Case
from tests.layouts.outcome import FP32_LOSS, assemble
from tests.layouts.resuming import SAVE_STEP
from tests.layouts.workers import Pool
from tests.marks import wide

MODELS = ("deep", "deepuntied", "deepgqa", "deepbert")
LAYOUTS = {
    "1": "tp1-dp1",
    "tp2": "tp2-dp1",
    "pp2": "pp2-tp1-dp1",
    "tp2 pp2": "pp2-tp2-dp1",
    "dp2": "tp1-dp2-zero1",
    "dp2 tp2": "tp2-dp2-zero3",  # each level once, as they keep the optimizer in other ways
    "pp2 vp2": "pp2-vp2-interleaved-tp1-dp1",
    "dp2 tp2 pp2": "pp2-tp2-dp2-zero2-sp",
}
# of models with fewer heads of keys and values than ranks
LAYOUTS_WITH_COPIES = {"tp4": "tp4-dp1", "tp8": "tp8-dp1-sp", "tp4 dp2": "tp4-dp2-zero2"}
ALL = list(product(MODELS, LAYOUTS, LAYOUTS))
_drawn = random.Random(6).sample(list(LAYOUTS), 8)
# every model and every layout once, and two runs that go on where they were
FEW = list(zip(MODELS, _drawn[::2], _drawn[1::2], strict=True))
FEW += [(model, a, a) for model, a, _ in FEW[::3]]


class Unbroken:
    """Runs that went through, each trained once: what they held at the save, and where they saved it."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.known: dict[tuple[str, str], Held] = {}

    def of(self, model: str, layout: str) -> Held:
        key = (model, layout)
        if key not in self.known:
            arguments = {"run_dir": str(self.run_dir(model, layout))}
            self.known[key] = work(self.pool, "unbroken", case_of(model, layout), self.folder / "dumped", arguments)
        return self.known[key]

    def run_dir(self, model: str, layout: str) -> Path:
        return self.folder / f"{model} {layout}"


@pytest.fixture(scope="module")
def unbroken(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    return Unbroken(pool, tmp_path_factory.mktemp("unbroken"))


@dataclass(frozen=True)
class Held:
    losses: list[float]
    tensors: dict[str, Tensor]  # weights, optimizer and average, whole
    remembered: dict[str, Any]
    last_averages: list[str]  # a digest of each rank's averages after the last step


def case_of(model: str, layout: str) -> Case:
    return Case.named(f"{model}-{(LAYOUTS | LAYOUTS_WITH_COPIES)[layout]}-fp32-micro2")


def work(pool: Pool, function: str, case: Case, dumped: Path, arguments: dict[str, Any]) -> Held:
    shutil.rmtree(dumped, ignore_errors=True)
    dumped.mkdir()
    arguments |= {"name": case.name, "dumped": str(dumped)}
    ranks = pool.run(f"tests.layouts.resuming:{function}", case.num_processes, arguments)
    tensors, quarrels = assemble([rank["pieces"] for rank in ranks], dumped)
    assert not quarrels
    first = ranks[0]
    for rank in ranks:
        assert (rank["losses"], rank["remembered"]) == (first["losses"], first["remembered"])
    return Held(first["losses"], tensors, first["remembered"], [rank["last_averages"] for rank in ranks])


def goes_on(pool: Pool, unbroken: Unbroken, folder: Path, model: str, a: str, b: str) -> None:
    begun, case = unbroken.of(model, a), case_of(model, b)
    checkpoint = unbroken.run_dir(model, a) / "checkpoints" / f"step_{SAVE_STEP:08d}"
    arguments = {"run_dir": str(folder / "run"), "checkpoint": str(checkpoint)}
    found = work(pool, "resumed", case, folder / "dumped", arguments)
    assert found.remembered == begun.remembered
    assert found.tensors.keys() == begun.tensors.keys() == names(case)
    different = [name for name, tensor in begun.tensors.items() if not same_bits(found.tensors[name], tensor)]
    assert not different
    after = begun.losses[SAVE_STEP:]
    assert found.losses == (after if a == b else pytest.approx(after, rel=FP32_LOSS, abs=0))
    assert a != b or found.last_averages == begun.last_averages


def names(case: Case) -> set[str]:
    """Return the names of a checkpoint's tensors: each weight, tied ones once, with AdamW's moments and the average."""
    seconds = {tie.second for tie in case.model_settings.ties()}
    weights = case.model_settings.weights().keys() - seconds
    return {f"{slot}.{name}" for slot in ("model", "optim.exp_avg", "optim.exp_avg_sq", "ema") for name in weights}


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


QUICK = ("deepgqa", "dp2", "pp2 vp2")  # shards of the optimizer become those of stages


@pytest.mark.parametrize(("model", "a", "b"), [QUICK, *wide(*(one for one in FEW if one != QUICK))])
def test_a_run_goes_on_at_another_layout(
    pool: Pool, unbroken: Unbroken, tmp_path: Path, model: str, a: str, b: str
) -> None:
    goes_on(pool, unbroken, tmp_path, model, a, b)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "a", "b"),
    [("fewkeys", "tp4", "tp2"), ("fewkeys", "1", "tp4 dp2"), ("onekey", "tp8", "tp4"), ("onekey", "tp4 dp2", "dp2")],
)
def test_copies_are_saved_once_and_read_by_each_holder(
    pool: Pool, unbroken: Unbroken, tmp_path: Path, model: str, a: str, b: str
) -> None:
    goes_on(pool, unbroken, tmp_path, model, a, b)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "a", "b"),
    [
        ("deepqwen", "tp2 pp2", "1"), ("deepneox", "1", "tp2 pp2"), ("deepolmo", "dp2 tp2 pp2", "tp2"),
        ("deepgemma", "tp2 pp2", "dp2"), ("deepgranite", "pp2 vp2", "tp2 pp2"), ("deepopt", "dp2", "tp2 pp2"),
        ("deepnanochat", "tp2", "pp2 vp2"),
    ],
)  # fmt: skip
def test_a_model_of_any_words_goes_on_at_another_layout(
    pool: Pool, unbroken: Unbroken, tmp_path: Path, model: str, a: str, b: str
) -> None:
    goes_on(pool, unbroken, tmp_path, model, a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "a", "b"), [one for one in ALL if one not in FEW])
def test_every_pair_of_layouts(pool: Pool, unbroken: Unbroken, tmp_path: Path, model: str, a: str, b: str) -> None:
    goes_on(pool, unbroken, tmp_path, model, a, b)
