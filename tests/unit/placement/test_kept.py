"""What a microbatch keeps: the published formula where there is one, and an order among the ways to do it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmtrain.models.bert_settings import BertSettings
from lmtrain.parallel.device_and_precision_settings import (
    AttentionRecomputeSettings,
    ComputeSettings,
    FullRecomputeSettings,
    NoRecomputeSettings,
    OperatorsRecomputeSettings,
)
from lmtrain.placement.layers_and_shards_of_ranks import Stage
from tests.unit.plan.planned_runs import GPT3, planned

MIDDLE = Stage(1, range(6, 7), first=False, last=False)
NONE = NoRecomputeSettings()
ON_CPU = ComputeSettings(device="cpu")


def a_block(model: Any = GPT3, **changes: Any) -> float:
    """In bytes x tokens x width, as Korthikanti 2022 counts."""
    run = planned(model, **({"recompute": NONE} | changes))
    return run.layers.activation_bytes(MIDDLE).hidden / (run.micro_batch * run.shape.seq_len * run.shape.width)


def test_gpt3_keeps_what_the_paper_says() -> None:
    """34 bytes over tp, of which dropout's masks are 2; a flash kernel keeps its sums alone of the scores."""
    assert 8 * a_block(replace(GPT3, dropout=0.1)) == pytest.approx(34, rel=0.01)
    assert a_block(sequence_parallel=False) == pytest.approx(8 + 24 / 8, rel=0.01)


def test_each_way_to_do_it_again_keeps_less() -> None:
    kinds = (NONE, AttentionRecomputeSettings(), FullRecomputeSettings())
    none, attention, full = (a_block(recompute=kind) for kind in kinds)
    assert none > attention > full == 2 / 8
    one_process = [a_block(recompute=kind, tp=1, pp=96) for kind in (NONE, OperatorsRecomputeSettings())]
    assert one_process[0] > one_process[1]


def test_words_of_the_model_change_what_is_kept() -> None:
    wide = replace(GPT3, num_kv_heads=8), replace(GPT3, parallel_block="one_norm")
    more = replace(GPT3, activation="silu", gated=True, ffn_width=4 * 12288), replace(GPT3, positions="rotary")
    assert all(a_block(model) < a_block() for model in wide)
    assert all(a_block(model) > a_block() for model in more)
    assert a_block(document_mask=True) == a_block(), "a mask of blocks is shared by all of them"
    dropped = replace(GPT3, dropout=0.1)
    assert a_block(dropped, document_mask=True) > a_block(dropped), "a matrix is made for each"


def test_each_sample_has_a_mask_of_its_own_padding() -> None:
    """So what a token keeps is the same in microbatches of any size, on a device that has the masks whole."""
    bert = BertSettings(num_layers=12, width=64, num_heads=4, vocab_size=250, seq_len=32)
    one, four = (a_block(bert, micro_batch=size, pp=4, tp=1, compute=ON_CPU) for size in (1, 4))
    assert four == pytest.approx(one)


def test_only_the_last_stage_has_logits() -> None:
    run = planned(recompute=NONE)
    stages = [held[0] for held in run.stages]
    assert [run.layers.activation_bytes(stage).logits for stage in stages[:-1]] == [0] * 15
    assert run.layers.activation_bytes(stages[-1]).logits == 2048 * 50304 / 8 * 2


def test_a_backward_in_halves_puts_off_more_than_it_kept() -> None:
    """Over a cut sequence products take whole ones: that is what zero-bubble schedules cost."""
    kept = planned(recompute=NONE).layers.activation_bytes(MIDDLE)
    assert kept.deferred > kept.hidden


@pytest.mark.parametrize("cut", [True, False])
def test_halves_of_a_parallel_block_share_an_input_that_is_whole(cut: bool) -> None:
    """If the input is cut, attention and the MLP gather a copy each, as they do where the MLP follows attention."""
    row, parallel = (
        planned(replace(GPT3, parallel_block=words), recompute=NONE, sequence_parallel=cut)
        .layers.activation_bytes(MIDDLE)
        .deferred
        for words in ("no", "one_norm")
    )
    assert (parallel == row) if cut else (parallel < row)
