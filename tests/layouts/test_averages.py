"""At any layout the average of the weights is that of a loop over them, and it is measured as one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_rank_bytes
from tests.layouts.cases import Case
from tests.layouts.outcome import FP32_LOSS
from tests.layouts.test_held import planned_of
from tests.layouts.workers import Pool

pytestmark = pytest.mark.wide
CASES = [
    "tied-tp2-dp1-sp-fp32-micro2",
    "tied-dp2-zero0-fp16-micro2",
    "tied-dp2-zero1-bf16-micro4-summed",
    "untied-dp2-zero2-full-fp32-micro2",
    "gqa-dp4-zero3-hybrid-full-fp32-micro4",
    "tied-tp2-dp2-zero3-sp-attention-bf16-micro2",
    "fewkeys-tp4-dp2-zero2-fp32-micro1",
    "bert-tp2-dp1-fp16-micro2",
    "deep-pp2-tp1-dp1-fp32-micro2",  # both stages hold the tied weight
    "deep-pp2-tp2-dp2-zero2-sp-fp32-micro2",
    "deepgqa-pp2-vp2-interleaved-tp1-dp1-bf16-micro4",
    "deepuntied-pp2-zb_h1-tp1-dp2-zero1-fp32-micro5",
]


OTHER_OPTIMIZERS = [("deep-pp2-tp2-dp1-fp32-micro2", "lamb"), ("gqa-tp2-dp2-zero1-fp32-micro2", "muon")]


@pytest.mark.parametrize(("name", "optimizer"), [*((name, "adamw") for name in CASES), *OTHER_OPTIMIZERS])
def test_the_average_of_a_layout_is_that_of_a_loop(name: str, optimizer: str, pool: Pool) -> None:
    case = Case.named(name)
    function, arguments = "tests.layouts.averaging:averaged", {"optimizer": optimizer}
    ranks = pool.run(function, case.num_processes, arguments | {"name": case.name})
    assert [wrong for rank in ranks for wrong in rank["wrong"]] == []
    run = replace(planned_of(case), average_every_steps=1)
    assert [rank["bytes"] for rank in ranks] == [count_rank_bytes(run, rank)["average"] for rank in range(len(ranks))]
    (one,) = pool.run(function, 1, arguments | {"name": case.reference.name})
    assert one["wrong"] == []
    assert one["loss"] != pytest.approx(one["loss_of_average"], rel=10 * FP32_LOSS), "they could be exchanged unseen"
    tolerance = FP32_LOSS if case.precision == "fp32" else 1e-3
    for rank in ranks:
        assert rank["loss_of_average"] == pytest.approx(one["loss_of_average"], rel=tolerance)
        assert rank["loss"] == pytest.approx(one["loss"], rel=tolerance)
