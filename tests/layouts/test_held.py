"""What the planner says that each rank holds is what real processes hold, name by name."""

from __future__ import annotations

import pytest

from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_rank_bytes
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from tests.layouts.cases import Case, random_cases
from tests.layouts.toy_data import EvenlyMasked
from tests.layouts.workers import Pool
from tests.marks import wide
from tests.unit.plan.planned_runs import planned_on_cpu

EXACT = ("weights", "gradients", "masters", "moments")
WITHIN = 0.03
NEARLY = ("activations", "logits", "gathered")
# a kind of model, recompute, schedule, level of zero and precision each, at most four processes but for hybrid sharding
SOME = (
    "bert-tp2-sp-operators-bf16-micro4",
    "deepgqa-pp4-vp2-zb_v-tp1-dp1-bf16-micro8",
    "deep-pp2-zb_h1-tp1-dp2-zero2-fp32-micro4",
    "deepbert-pp2-vp2-interleaved-tp1-dp2-zero3-first-fp32-micro5",
    "deeppost-pp2-gpipe-cost-tp2-sp-fp16-micro2",
    "deepuntied-pp2-tp1-dp2-zero1-attention-bf16-micro4",
    "gqa-tp2-dp4-zero3-hybrid-sp-bf16-micro4",
    "parallel-tp4-full-fp32-micro1",
    "postnorm-dp3-zero2-attention-fp16-micro4",
    "tied-dp2-zero0-fp32-micro1",
    "tied-tp1-dp1-fp32-micro4-dropout",
    "window-tp2-dp2-zero1-bf16-micro1",
    "gqa-tp2-dp2-zero2-sp-attention-bf16-micro4-documents",
    "window-tp2-dp1-fp32-micro4-documents",
    "cappedgqa-tp2-dp2-zero3-bf16-micro4",
    "deepscaled-pp2-zb_h1-tp1-dp1-fp32-micro4",
    "deeptwonorms-pp2-zb_h1-tp1-dp1-bf16-micro4",
    "headnorm-pp2-tp1-dp2-zero2-attention-bf16-micro4",
    "pattern-pp2-tp1-dp1-full-fp32-micro4-documents",
    "wholenorm-pp2-tp2-sp-operators-bf16-micro4",
)


@pytest.mark.parametrize(
    "name",
    ["gqa-tp1-attention-bf16-micro1", "deep-pp2-zb_h1-tp1-dp1-fp32-micro4", *wide(*SOME)],
)
def test_each_rank_holds_what_the_planner_says(name: str, pool: Pool) -> None:
    _compare(Case.named(name), pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in random_cases(60)])
def test_so_do_the_ranks_of_random_layouts(name: str, pool: Pool) -> None:
    _compare(Case.named(name), pool)


def _compare(case: Case, pool: Pool) -> None:
    run = planned_of(case)
    assert not case.problems()
    for rank, held in enumerate(pool.run("tests.layouts.held:measure", case.num_processes, {"name": case.name})):
        said = count_rank_bytes(run, rank)
        assert {key: said[key] for key in EXACT} == {key: held[key] for key in EXACT}, f"rank {rank}"
        for key in NEARLY:
            assert said[key] == pytest.approx(held[key], rel=WITHIN, abs=1), f"rank {rank}: {key}"


def planned_of(case: Case) -> PlannedRun:
    return PlannedRun(
        model=case.model_settings, parallel=case.parallel, precision=case.precision_settings, compute=case.compute,
        optim=AdamWSettings(lr=1e-3), recompute=case.recompute_settings, micro_batch=case.train.micro_batch,
        global_batch=case.global_batch, document_mask=case.documents,
        scored_share=1.0 if case.model_settings.terms == ("lm",) else EvenlyMasked.share,
    )  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("rank", [0, 65, 1023])
def test_a_rank_of_gpt3_holds_what_the_planner_says(rank: int, pool: Pool) -> None:
    """GPT-3 175B, tp 8, pp 16, dp 8: the rank's real modules, on tensors without memory."""
    run = planned_on_cpu()
    (held,) = pool.run("tests.layouts.pretended:rank_of_gpt3", 1, {"rank": rank})
    said = count_rank_bytes(run, rank)
    (stage,) = run.stages[run.parallel.layout.coordinate(rank).pp]
    one = run.layers.activation_bytes(stage)
    said |= {"activations": round(one.hidden), "logits": round(one.logits)}  # of one microbatch
    for key, size in held.items():
        assert said[key] == pytest.approx(size, rel=0.01), key
