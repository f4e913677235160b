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

from lmtrain.batch import IGNORED, Batch, StepBatches
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.objectives.causal_and_masked_objectives import CausalLM, MaskedLM, build_objective
from lmtrain.models.objectives.cross_entropy import count_hits
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.parallel_model import ParallelModel

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
    not_padding = torch.ones_like(tokens).bool()
    return Batch(tokens, labels, segments_BT=tokens % 2, pair_labels_B=pairs, not_padding_BT=not_padding)


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


def _gradients(model: ParallelModel, sums: Tensor) -> dict[str, Tensor]:
    model.masters.clear_gradients(1)
    torch.autograd.backward(sums.sum())
    return {name: p.grad for name, p in model.parameters.items() if p.grad is not None}


@pytest.mark.parametrize("without_labels", [False, True])
@pytest.mark.parametrize("pair_head", [False, True])
def test_scoring_the_labelled_positions_alone_changes_nothing(pair_head: bool, without_labels: bool) -> None:
    """Sums, hits and every gradient are those of scoring all; also where a microbatch has no label at all."""
    model = model_of(replace(SETTINGS, pair_head=pair_head))
    objective, batch = model.objective, batch_of().without_labels() if without_labels else batch_of()
    few = objective.prepare_batch(batch)
    assert few.scored_positions_K.numel() == max(1, int((batch.labels_BT != IGNORED).sum()))
    sums, valid, gradients = [], [], []
    for given in (batch, few):
        hidden_BTD = model.model(given)
        sums.append(objective.loss_sums(model.model, hidden_BTD, given))
        valid.append(objective.validation_sums(model.model, hidden_BTD.detach(), given))
        gradients.append(_gradients(model, sums[-1]))
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(valid[1], valid[0], rtol=1e-6, atol=0)
    assert gradients[0].keys() == gradients[1].keys() == model.parameters.keys()
    for name, right in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], right, rtol=1e-5, atol=1e-6)


def test_the_head_is_given_no_more_than_has_labels() -> None:
    model, step = model_of(), step_of(4)
    rows: list[int] = []
    head: Any = model.model.head  # type: ignore[attr-defined]
    head.decoder.register_forward_hook(lambda module, given, made: rows.append(made.shape[:-1].numel()))
    model.forward_backward(step)
    next(model.validation_sums(step.microbatches[:1]))
    counts = [int((batch.labels_BT != IGNORED).sum()) for batch in step.microbatches]
    assert rows == [*counts, counts[0]]
    assert max(rows) < step.microbatches[0].labels_BT.numel()


def test_cuts_of_a_sequence_give_equally_many_positions() -> None:
    """Each rank its own, and all of them the labels of all, in the order in which a head gathers them."""
    batch = batch_of()
    found, of_rank = [], []
    for cut in range(4):
        objective = MaskedLM(("mlm", "pair"))
        objective.num_shards, objective.shard_index = 4, cut
        few = objective.prepare_batch(batch)
        found.append(few.scored_labels_K.view(4, -1))
        mine = batch.labels_BT.chunk(4, dim=1)[cut].flatten()
        at, labels = few.scored_positions_K, few.scored_labels_K.view(4, -1)[cut]
        kept = labels != IGNORED
        assert torch.equal(mine[at[kept]], labels[kept])
        assert int(kept.sum()) == int((mine != IGNORED).sum())
        of_rank.append(at)
    assert all(torch.equal(one, found[0]) for one in found)
    assert len({len(at) for at in of_rank}) == 1
    assert found[0].numel() < batch.labels_BT.numel()


def test_a_planted_bug_is_noticed() -> None:
    """Positions that are off by one have other labels."""
    model, batch = model_of(), batch_of()
    few = model.objective.prepare_batch(batch)
    wrong = replace(few, scored_positions_K=few.scored_positions_K.roll(1))
    hidden_BTD = model.model(batch)
    right, found = (model.objective.loss_sums(model.model, hidden_BTD, given)[0] for given in (batch, wrong))
    assert abs(found - right) > 1e-3 * right


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
    assert objective.validation_sums(model, hidden_BTD, batch).shape == (2, 1)
    assert sums[0] == CausalLM().loss_sums(model, hidden_BTD, batch)[0]


def test_hits_are_labels_with_the_highest_score() -> None:
    model = model_of()
    batch = batch_of()
    (losses, hits) = next(model.validation_sums([batch]))
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
    assert count_hits(logits, torch.tensor([0, 0, IGNORED])).item() == 1
    assert count_hits(logits, torch.tensor([1, 1, 0])).item() == 2


def test_a_batch_without_labels_adds_nothing() -> None:
    model = model_of()
    assert next(model.validation_sums([batch_of().without_labels()])).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_what_a_model_learns_names_its_objective() -> None:
    assert type(build_objective(("lm",))) is CausalLM
    assert build_objective(("mlm", "pair")).terms == ("mlm", "pair")
