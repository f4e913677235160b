"""Losses by sample of a blend are one process's at any layout, add up to the step's, and change no gradient."""

from __future__ import annotations

from typing import Any

import pytest

from tests.layouts.cases import Z_MODELS, Case
from tests.layouts.workers import Pool
from tests.marks import slow, wide

STEPS = 3
LAYOUTS = [
    *wide(
        "untied-tp2-dp1-fp32-micro2",
        "untied-tp2-dp2-zero1-sp-fp32-micro4",
        "tied-tp3-dp1-sp-fp32-micro1-documents",
        "gqa-dp4-zero3-hybrid-fp32-micro2",
        "deep-pp2-dp2-zero1-fp32-micro4",
        "deepuntied-pp2-vp2-interleaved-tp2-dp1-sp-fp32-micro4",
        "deepgqa-pp2-zb_h1-dp1-fp32-micro3-summed",
        "untied-tp2-dp2-zero2-fp16-micro2-summed",
        "zloss-tp2-dp2-zero1-sp-fp32-micro4",
        "deepzloss-pp2-dp2-zero1-fp16-micro4-summed",
    ),
    *slow("untied-tp2-dp1-fp32-micro2-compile", "tied-dp2-zero1-fp32-micro2-compile"),
]


def train(pool: Pool, name: str) -> dict[str, Any]:
    ranks = pool.run("tests.layouts.sources:train", Case.named(name).num_processes, {"name": name, "steps": STEPS})
    assert all(rank == ranks[0] | {"same_bits": rank["same_bits"]} for rank in ranks), "every rank gets every number"
    assert all(rank["same_bits"] for rank in ranks), "gradients and losses are those without losses by sample"
    return dict(ranks[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_samples_equal_one_process(name: str, pool: Pool) -> None:
    case = Case.named(name)
    alone, spread = train(pool, f"{case.model}-fp32-micro1" + "-documents" * case.documents), train(pool, name)
    tolerance = 1e-5 if case.precision == "fp32" else 2e-3
    for expected, step in zip(alone["steps"], spread["steps"], strict=True):
        assert step["samples"] == pytest.approx(expected["samples"], rel=tolerance, abs=1e-4)
        assert (step["sources"], step["labels"]) == (expected["sources"], expected["labels"])
        if case.model in Z_MODELS:
            assert step["z_loss"] == pytest.approx(expected["z_loss"], rel=tolerance)
        assert sum(step["samples"]) / step["labels"] == pytest.approx(step["loss"], rel=1e-5)
    if alone["plain"] is not None:
        assert spread["steps"][0]["samples"] == pytest.approx(alone["plain"], rel=tolerance, abs=1e-4)
    losses, hits = spread["valid"]
    assert losses == pytest.approx(alone["valid"][0], rel=tolerance, abs=1e-4)
    assert [sum(losses), sum(hits)] == pytest.approx(spread["total"], rel=1e-5)
    assert abs(sum(hits) - sum(alone["valid"][1])) <= 2, "near ties may fall to either side"
