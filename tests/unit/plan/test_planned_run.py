"""Run settings become a Case: each setting that matters to time or memory changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmtrain.models.bert_settings import BertSettings
from lmtrain.optim.muon_settings import MuonSettings
from lmtrain.parallel.device_and_precision_settings import (
    AttentionRecomputeSettings,
    ComputeSettings,
    Fp16Settings,
    Fp32Settings,
    FullRecomputeSettings,
    NoRecomputeSettings,
    OperatorsRecomputeSettings,
)
from lmtrain.plan.cost_model.step_time_and_energy import price_step
from lmtrain.plan.cost_model.training_workload import (
    Attention,
    Case,
    Overlap,
    Pointwise,
    RecomputedShares,
    Schedule,
    stack_cases,
)
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun, build_case
from tests.unit.plan.cases import CONF, gpt3
from tests.unit.plan.machines import hardware_named, nominal
from tests.unit.plan.planned_runs import GPT3, planned

A100 = hardware_named("a100_80gb", CONF)


def case(run: PlannedRun) -> Case:
    return build_case(run, A100)


def test_gpt3_is_the_case_of_the_paper() -> None:
    """Written by hand from the paper, and made from settings."""
    hand = gpt3(recomputed=RecomputedShares(products=1, attention=1, pointwise=1, collectives=1), precision="bf16")
    ours = case(planned(sequence_parallel=False))
    assert replace(hand, program=ours.program, vocab=ours.vocab, first_stage=6, largest_stage=6, last_stage=6) == ours
    assert ours.vocab == 50304


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"pp": 32}, "pp", 32),
        ({"vp": 2, "schedule": "interleaved"}, "vp", 2),
        ({"schedule": "zb_h1", "recompute": NoRecomputeSettings()}, "schedule", Schedule.ZB_1),
        ({"schedule": "zb_v", "vp": 2, "recompute": NoRecomputeSettings()}, "schedule", Schedule.ZB_V),
        ({"dp_shard": 4, "dp_replicate": 2}, "shard", 4),
        ({"dp_shard": 1, "dp_replicate": 8}, "zero", 0),
        ({"zero": 3}, "zero", 3),
        ({"sequence_parallel": False}, "sequence_parallel", False),
        ({"micro_batch": 2}, "num_microbatches", 96),
        ({"precision": Fp16Settings()}, "precision", "fp16"),
        ({"optim": MuonSettings(lr=1e-3)}, "optimizer_bytes", pytest.approx(8, rel=0.01)),
        ({"average_every_steps": 2}, "average_bytes", 6),  # 4 read of the weight, 4 read and 4 written of the average
        ({"average_every_steps": 2}, "optimizer_bytes", 16),
        ({"recompute": AttentionRecomputeSettings()}, "recomputed", RecomputedShares(attention=1)),
        ({"recompute": OperatorsRecomputeSettings()}, "recomputed", RecomputedShares(pointwise=1, collectives=1)),
        # because: the first rank does all of its blocks again, and the others wait for it
        ({"recompute": FullRecomputeSettings(blocks=6)}, "recomputed", case(planned()).recomputed),
    ],
)
def test_a_setting_changes_the_case(changes: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(case(planned(**changes)), field) == value


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"activation": "silu", "gated": True}, "gated", True),
        ({"num_kv_heads": 8}, "num_kv_heads", 8),
        ({"positions": "rotary"}, "rotary", True),
        ({"parallel_block": "one_norm"}, "parallel_block", True),
        ({"tied": False}, "tied", False),
        ({"dropout": 0.1}, "dropout", True),
        ({"vocab_size": 50305, "vocab_multiple": 1}, "vocab", 50312),
        ({"window": 512}, "causal", False),
        ({"parallel_block": "no"}, "parallel_block", False),
        ({"window": 512, "layer_pattern": "WWF"}, "causal", True),
        ({"window": 512, "layer_pattern": "WWF"}, "window_share", pytest.approx(2 / 3)),
        ({"positions": "rotary", "layer_pattern": "F"}, "rotary", False),
        ({"norm_order": "sandwich"}, "extra_norms", 2), ({"norm_order": "branch"}, "extra_norms", 0),
        ({"parallel_block": "one_norm"}, "extra_norms", 0), ({"parallel_block": "two_norms"}, "extra_norms", 1),
        ({"norm_weight": "from_zero"}, "extra_norms", 2), ({"qk_norm": "whole"}, "qk_norm", True),
        ({"logit_scale": 0.5}, "scaled_logits", True), ({"logit_scale": 0.5}, "capped_logits", False),
        ({"logit_cap": 30.0}, "capped_logits", True),
    ],
)
def test_the_model_changes_the_case(changes: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(case(planned(replace(GPT3, **changes))), field) == value


def test_stages_are_as_uneven_as_they_will_be() -> None:
    """The rank of the head has fewer layers where stages are balanced by cost."""
    deep = replace(GPT3, num_layers=98)
    by_layers, by_cost = (case(planned(deep, balance=balance)) for balance in ("layers", "cost"))
    assert (by_layers.largest_stage, by_layers.last_stage) == (7, 6)
    assert by_cost.last_stage < by_cost.largest_stage
    folded = case(planned(replace(GPT3, num_layers=97), schedule="zb_v", vp=2, recompute=NoRecomputeSettings()))
    assert (folded.largest_stage, folded.last_stage) == (6, 7), "the first rank of a V has the head"


def test_a_matrix_excludes_the_flash_kernels() -> None:
    """On a GPU masks are of blocks, where nothing is dropped."""
    bert = BertSettings(num_layers=24, width=1024, num_heads=16, vocab_size=30522, seq_len=512)
    models: list[tuple[Any, dict[str, Any]]] = [
        (bert, {"pp": 1}), (replace(GPT3, window=512), {}), (GPT3, {"document_mask": True}),
    ]  # fmt: skip
    for model, changes in models:
        assert case(planned(model, **changes)).program.attention is Attention.FLASH2
        assert case(planned(replace(model, dropout=0.1), **changes)).program.attention is Attention.FLASH1
    assert case(planned(precision=Fp32Settings())).program.attention is Attention.FLASH1


def test_capped_scores_are_held_where_no_block_mask_is() -> None:
    """Dropout keeps block masks away, and no other fused kernel caps scores."""
    capped = replace(GPT3, attention_cap=50.0)
    kernels = [case(planned(model)).program.attention for model in (capped, replace(capped, dropout=0.1))]
    assert kernels == [Attention.FLASH2, Attention.SCORES]


def test_what_lies_beyond_a_window_is_skipped_where_blocks_are() -> None:
    windows = {dropout: case(planned(replace(GPT3, window=512, dropout=dropout))) for dropout in (0.0, 0.1)}
    assert [(one.window, one.causal) for one in windows.values()] == [(512, False), (0, False)]
    assert [(one.window, one.causal) for one in (case(planned()), case(planned(replace(GPT3, window=2048))))] == [
        (0, True), (0, True),
    ], "as long as the sequence it is none"  # fmt: skip


def test_the_loss_is_one_kernel_but_in_plain_torch_on_a_cpu() -> None:
    ways = [("cuda", False), ("cpu", True), ("cpu", False)]
    programs = [case(planned(compute=ComputeSettings(device=d, compile=c))).program for d, c in ways]  # type: ignore[arg-type]
    assert [program.fused_loss for program in programs] == [True, True, False]


def test_a_compiler_fuses_and_waits() -> None:
    program = case(planned(compute=ComputeSettings(compile=True))).program
    assert (program.pointwise, program.tp_overlap) == (Pointwise.COMPILED, Overlap.NONE)


def test_products_of_fp32_numbers_cut_to_tf32_are_fast() -> None:
    """Half of bf16's peak, with bytes of fp32."""
    fp32, tf32 = (
        stack_cases([case(planned(precision=Fp32Settings(), compute=ComputeSettings(tf32=on)))])
        for on in (False, True)
    )
    assert [fp32.half_peak[0], tf32.half_peak[0]] == [19.5e12, 156e12]
    assert fp32.precision[0] == tf32.precision[0] == 4
    volta = hardware_named("v100_32gb", CONF)
    assert volta.peak("tf32") == volta.peak("fp32"), "which has none"


def test_zero_2_pays_for_each_microbatch() -> None:
    """Its gradients are reduced as soon as a microbatch has made them."""
    one, two = (price_step(stack_cases([case(planned(zero=zero))]), nominal()).reduce[0] for zero in (1, 2))
    assert two > 10 * one


def test_an_average_of_the_weights_costs_more_memory_traffic_the_more_often_it_is_updated() -> None:
    none, rare, often = (
        price_step(stack_cases([case(planned(average_every_steps=every))]), nominal()).update[0] for every in (0, 10, 1)
    )
    assert often - none == pytest.approx(10 * (rare - none))
    assert 0.1 < (often - none) / none < 0.5
