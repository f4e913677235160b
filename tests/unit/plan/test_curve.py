"""Results at growing numbers of devices, and the scaling study of 2024, whose batch and length were not published."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.plan.search.order_layouts_by_speed import CostModel, LayoutLimits
from lmtrain.plan.search.predict_layout_cost import CurvePoint, LayoutResult, ScalingInputs, scaling_curve
from tests.unit.plan.ranked_run import h100, ranked, run_of, study

LLAMA_7B = GPTSettings(
    num_layers=32, width=4096, num_heads=32, ffn_width=11008, vocab_size=32000, seq_len=4096, positions="rotary",
    norm="rmsnorm", activation="silu", gated=True, bias="none", tied=False,
)  # fmt: skip
SHARDED = {"dp_replicate": 1, "zero": 3, "balance": "layers"}
PUBLISHED_LOSS, PUBLISHED_POWER = 0.3722, 0.0587  # of a GPU's throughput and power, from 128 to 2,048 H100


def points_of(gpus: list[int], *, seq_len: int, per_gpu: int) -> list[CurvePoint]:
    run = run_of(replace(LLAMA_7B, seq_len=seq_len), per_gpu * gpus[0], compiles=True)
    whole = ScalingInputs(
        run=run, hardware=h100(), limits=LayoutLimits(),
        cost_model=CostModel(), fixed_settings=SHARDED, batch_per_gpu=float(per_gpu)
    )  # fmt: skip
    return list(scaling_curve(whole, whole.rank_layouts(gpus[0]), gpus))


def test_twice_the_devices_bring_at_most_twice_as_much() -> None:
    """A number for which there is no layout is passed over: the next is compared with the last that has one."""
    found = list(scaling_curve(study(), ranked(), [16, 17, 32, 64]))
    assert [point.gpus for point in found] == [16, 17, 32, 64]
    assert found[0].gain is None
    assert (found[1].best, found[1].gain) == (None, None)
    for before, point in pairwise([found[0], *found[2:]]):
        assert before.best is not None
        assert point.best is not None
        assert point.best.run.global_batch == 64
        assert point.gain == pytest.approx(point.best.tokens_per_s / before.best.tokens_per_s)
        assert point.gain is not None
        assert 1.2 < point.gain < 2.1


def test_the_batch_may_grow() -> None:
    grows = replace(study(), batch_per_gpu=4.0)
    assert [point.best and point.best.run.global_batch for point in scaling_curve(grows, ranked(), [16, 32])] == [
        64,
        128,
    ]


@pytest.mark.wide
def test_what_was_best_before_is_priced_beside_what_took_over() -> None:
    for before, point in pairwise(points_of([8, 64, 512], seq_len=2048, per_gpu=1)):
        assert before.best is not None
        assert point.best is not None
        old, new = before.best.run.parallel, point.best.run.parallel
        if (old.pp, old.tp) == (new.pp, new.tp):
            assert point.same_cut is None
        elif point.same_cut is not None:
            assert (point.same_cut.run.parallel.pp, point.same_cut.run.parallel.tp) == (old.pp, old.tp)
            assert point.same_cut.seconds >= point.best.seconds


@pytest.mark.wide
def test_the_scaling_study_lies_within_what_is_expected() -> None:
    """1 to 4 sequences of 2,048 or 4,096 tokens a GPU: from the least to the most loss, with the interval."""
    losses, power = [], []
    for seq_len, per_gpu in ((2048, 1), (4096, 4)):
        few, many = (point.zero3_only for point in points_of([128, 2048], seq_len=seq_len, per_gpu=per_gpu))
        assert few is not None
        assert many is not None
        losses += [1 - _each(many, at) / _each(few, 0) for at in (-1, 0, 1)]
        power.append(1 - many.watts / few.watts)
    assert min(losses) <= PUBLISHED_LOSS <= max(losses)
    assert min(power) - 0.02 <= PUBLISHED_POWER <= max(power) + 0.02


def _each(one: LayoutResult, at: int) -> float:
    """Tokens a second and device, at the slow end of what is expected, in the middle, or at the fast end."""
    seconds = {-1: one.interval_s[1], 0: one.seconds, 1: one.interval_s[0]}[at]
    return one.tokens_per_step / seconds / one.gpus


def test_a_few_cuts_or_stages_take_over_from_sharding_alone() -> None:
    """Where a GPU has one short sequence: little is won on a node, and much on thousands of GPUs."""
    found = points_of([8, 2048], seq_len=2048, per_gpu=1)
    gains = [point.zero3_only.seconds / point.best.seconds - 1 for point in found if point.zero3_only and point.best]
    assert len(gains) == 2
    assert gains[0] < 0.05
    assert gains[1] > 0.2
    last = found[-1].best
    assert last is not None
    assert max(last.run.parallel.pp, last.run.parallel.tp) in (2, 3, 4)
