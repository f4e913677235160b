"""Two terms, each the mean over its own labels: masked tokens and pairs; and how many of each were the likeliest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.batch import IGNORED, Batch
from lmtrain.data.loader import StepBatches
from lmtrain.models.bert_settings import BertSettings
from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.objectives.cross_entropy import hit_sum
from lmtrain.objectives.masked_lm import MaskedLM, build_objective
from lmtrain.parallel.apply import build_parallel
from lmtrain.parallel.compute_settings import ComputeSettings
from lmtrain.parallel.model import ParallelModel
from lmtrain.parallel.precision_settings import Fp32Settings

SETTINGS = BertSettings(num_layers=1, width=16, num_heads=2, seq_len=8, vocab_size=13, vocab_multiple=8, init_std=0.5)
COUNT = 12


def model_of(settings: BertSettings = SETTINGS) -> ParallelModel:
    return build_parallel(
        settings, Fp32Settings(), ComputeSettings(), torch.device("cpu"), seed=1, training=True
    )  # fmt: skip


def batch_of() -> Batch:
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(13, (2, COUNT, 8), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.7] = IGNORED
    labels[4] = IGNORED
    pairs = torch.randint(2, (COUNT,), generator=generator)
    return Batch(tokens, labels, segments_BT=tokens % 2, pair_labels_B=pairs, real_BT=torch.ones_like(tokens).bool())


def step_of(num_microbatches: int) -> StepBatches:
    whole = batch_of()
    size = COUNT // num_microbatches
    parts = [whole.map(partial(_rows, first=i * size, count=size)) for i in range(num_microbatches)]
    counts = int((whole.labels_BT != IGNORED).sum()), COUNT
    return StepBatches(0, parts, COUNT, counts, np.arange(COUNT), whole.labels_BT.numel())


def _rows(array: Tensor, first: int, count: int) -> Tensor:
    return array[first : first + count]


def expected(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    hidden = model(batch)
    logits = model.logits(hidden)[..., :13].flatten(0, 1)
    return F.cross_entropy(logits, batch.labels_BT.flatten()), F.cross_entropy(
        model.pair_logits(hidden), batch.pair_labels_B
    )


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_each_term_is_the_mean_over_its_own_labels(num_microbatches: int) -> None:
    """In value and in gradient, however unevenly masked tokens are spread over microbatches."""
    model, plain = model_of(), model_of()
    shares = model.forward_backward(step_of(num_microbatches))
    assert shares.shape == (num_microbatches, 2)
    means = expected(plain.model, batch_of())
    torch.testing.assert_close(shares.sum(0), torch.stack(means).detach(), rtol=1e-5, atol=0)
    torch.autograd.backward(sum(means))  # type: ignore[arg-type]
    for name, parameter in plain.parameters.items():
        assert parameter.grad is not None
        torch.testing.assert_close(model.parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_counts_must_be_of_the_models_terms() -> None:
    model, step = model_of(), step_of(1)
    with pytest.raises(ValueError, match="zip"):
        model.forward_backward(replace(step, counts=step.counts[:1]))


def test_without_pairs_there_is_one_term() -> None:
    model, objective = model_of(replace(SETTINGS, pair_head=False)).model, MaskedLM(("mlm",))
    batch = batch_of()
    hidden_BTD = model(batch)
    sums = objective.loss_sums(model, hidden_BTD, batch)
    assert sums.shape == (1,)
    assert objective.valid_sums(model, hidden_BTD, batch).shape == (2, 1)
    assert sums[0] == CausalLM().loss_sums(model, hidden_BTD, batch)[0]


def test_hits_are_labels_with_the_highest_score() -> None:
    model = model_of()
    batch = batch_of()
    (losses, hits) = next(model.valid_sums([batch]))
    with torch.no_grad():
        bert: Any = model.model.train(False)
        hidden = bert(batch)
        labels = batch.labels_BT
        right = (bert.logits(hidden).argmax(-1) == labels) & (labels != IGNORED)
        pairs = bert.pair_logits(hidden).argmax(-1) == batch.pair_labels_B
        means = torch.stack(expected(bert, batch))
    assert hits.tolist() == [right.sum(), pairs.sum()]
    assert 0 < hits[1] < COUNT
    torch.testing.assert_close(losses, means * torch.tensor(step_of(1).counts), rtol=1e-5, atol=0)


def test_ignored_labels_hit_nothing() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 1.0]])
    assert hit_sum(logits, torch.tensor([0, 0, IGNORED])).item() == 1
    assert hit_sum(logits, torch.tensor([1, 1, 0])).item() == 2


def test_a_batch_without_labels_adds_nothing() -> None:
    model = model_of()
    assert next(model.valid_sums([batch_of().unlabelled()])).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_what_a_model_learns_names_its_objective() -> None:
    assert type(build_objective(("lm",))) is CausalLM
    assert build_objective(("mlm", "pair")).terms == ("mlm", "pair")
