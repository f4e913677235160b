"""BERT cut over two processes: logits of rows of any length, and a pair's judgement from the first token alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lmtrain.batch import IGNORED, Batch
from lmtrain.models.bert_settings import BertSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.placement.parallel_settings import ParallelSettings
from tests.layouts.workers import Pool
from tests.unit.parallel.spread import CPU

SETTINGS = BertSettings(num_layers=2, width=16, num_heads=2, seq_len=8, vocab_size=13, vocab_multiple=1, init_std=0.5)


def model_of(parallel: ParallelSettings) -> ParallelModel:
    return build_parallel(
        SETTINGS, Fp32Settings(), ComputeSettings(), CPU, seed=1, training=False,
        mesh=build_mesh(parallel.layout, CPU, 60.0), parallel=parallel,
    )  # fmt: skip


def batch_of(length: int, padded: bool) -> Batch:
    tokens = torch.randint(13, (3, length), generator=torch.Generator().manual_seed(2))
    real = torch.arange(length) < torch.tensor([[length], [length - 2], [4]])
    labels = torch.where(real & (tokens % 3 == 0), tokens, IGNORED)
    pairs = torch.tensor([0, 1, 1])
    return Batch(tokens, labels, segments_BT=tokens % 2, not_padding_BT=real if padded else None, pair_labels_B=pairs)


def told(sequence: bool, tp: int = 2) -> dict[str, Any]:
    model = model_of(ParallelSettings(tp=tp, sequence_parallel=sequence))
    logits = []
    for length in (8, 7):
        for padded in (True, False):
            batch = batch_of(length, padded)
            logits += [model.logits(batch), model.logits(batch, batch.labels_BT != IGNORED)]
    batch = batch_of(8, True)
    # because: what stands at the head of each cut is another token, and only the first may judge
    swapped = replace(batch, tokens_BT=batch.tokens_BT.roll(4, 1))
    sums = [next(iter(model.validation_sums([one]))) for one in (batch, swapped)]
    return {"logits": [x.tolist() for x in logits], "sums": [x.tolist() for x in sums]}


@pytest.mark.parametrize("sequence", [False, True])
def test_two_processes_say_what_one_says(pool: Pool, sequence: bool) -> None:
    (one,) = pool.run(f"{__name__}:told", 1, {"sequence": False, "tp": 1})
    for found in pool.run(f"{__name__}:told", 2, {"sequence": sequence}):
        for ours, theirs in zip(found["logits"], one["logits"], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(found["sums"], one["sums"], strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
            assert ours[1] == theirs[1]
