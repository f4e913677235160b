"""A vocabulary cut over processes: the loss of whole logits, without them, and embeddings of every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lmtrain.batch import IGNORED
from lmtrain.kernels import cross_entropy
from lmtrain.models.objectives.cross_entropy import count_hits as whole_hit_sum
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.tensor_parallel import count_hits, cross_entropy_sum, label_scores
from lmtrain.placement.layers_and_shards_of_ranks import part_shape
from lmtrain.spec import Cut, Split
from tests.layouts.workers import Pool
from tests.unit.parallel.cut_models import Record, distance, world_axis

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def logits_and_labels(vocab_size: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits far from 0 on one side, where exponentials overflow without the maximum; padded columns -inf."""
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(4, 6, columns, generator=generator, dtype=torch.float64) * 30 + 200).to(dtype)
    logits[..., vocab_size:] = float("-inf")
    labels = torch.randint(vocab_size, (4, 6), generator=generator)
    labels[1, 2:4] = labels[3] = IGNORED
    return logits, labels


def rows_per_rank(num_rows: int, size: int) -> int:
    """Return the number of rows of the vocabulary on each rank, padded until all ranks have as many."""
    return part_shape((num_rows,), Cut(Split.VOCAB), size)[0]


def losses(vocab_size: int, dtype: str, chunk_elements: int, z_loss: float = 0.0) -> list[float]:
    """Distance of loss and of this rank's gradient from those of whole logits, the z-loss with them."""
    axis = world_axis()
    rows = rows_per_rank(vocab_size, axis.size)
    whole, labels = logits_and_labels(vocab_size, rows * axis.size, DTYPES[dtype])
    mine = slice(axis.index * rows, (axis.index + 1) * rows)
    here = whole[..., mine].clone().requires_grad_()
    whole.requires_grad_()
    whole_NV, labels_N = whole.flatten(0, 1).to(cross_entropy.sum_dtype(whole)), labels.flatten()
    expected = F.cross_entropy(whole_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    expected = expected + z_loss * whole_NV.logsumexp(-1)[labels_N != IGNORED].square().sum()
    torch.autograd.backward(expected * 3)
    before, cross_entropy.CHUNK_ELEMENTS = cross_entropy.CHUNK_ELEMENTS, chunk_elements
    try:
        loss = cross_entropy_sum(here, labels, axis, z_loss=z_loss).sum()
        torch.autograd.backward(loss * 3)
    finally:
        cross_entropy.CHUNK_ELEMENTS = before
    assert loss.dtype == expected.dtype
    assert here.grad is not None
    assert whole.grad is not None
    return [distance(loss, expected), distance(here.grad.double(), whole.grad[..., mine].double())]


@pytest.mark.parametrize(
    ("num_ranks", "vocab_size", "dtype", "chunk_elements", "limit"),
    [
        (2, 13, "fp64", 1 << 20, 1e-12),
        (3, 13, "fp64", 1, 1e-12),  # a row a chunk
        (4, 5, "fp64", 12, 1e-12),  # 2 rows a rank, so that one has padding and the last has nothing else
        (2, 13, "fp32", 40, 1e-6),
        (2, 13, "bf16", 40, 1e-6),  # the sums are fp32 whatever the logits are; bf16 gradients round alike
    ],
)
def test_loss_and_gradient_of_whole_logits(
    pool: Pool, num_ranks: int, vocab_size: int, dtype: str, chunk_elements: int, limit: float
) -> None:
    arguments = {"vocab_size": vocab_size, "dtype": dtype, "chunk_elements": chunk_elements}
    for loss, gradient in pool.run(f"{__name__}:losses", num_ranks, arguments):
        assert loss < limit
        assert gradient < limit


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 13), (4, 5)])
def test_z_loss_and_gradient_of_whole_logits(pool: Pool, num_ranks: int, vocab_size: int) -> None:
    arguments = {"vocab_size": vocab_size, "dtype": "fp64", "chunk_elements": 12, "z_loss": 0.01}
    for loss, gradient in pool.run(f"{__name__}:losses", num_ranks, arguments):
        assert loss < 1e-12
        assert gradient < 1e-12


def hits(vocab_size: int) -> list[float]:
    """Counted over ranks and from whole logits, among labels half of which are right."""
    axis = world_axis()
    rows = rows_per_rank(vocab_size, axis.size)
    whole, labels = logits_and_labels(vocab_size, rows * axis.size, torch.float32)
    kept = labels != IGNORED
    labels = torch.where(kept & (torch.arange(6) % 2 == 0), whole.argmax(-1), labels)
    here = whole[..., axis.index * rows : (axis.index + 1) * rows]
    expected = ((whole.argmax(-1) == labels) & kept).sum().item()
    return [count_hits(here, labels, axis).item(), whole_hit_sum(whole, labels).item(), expected]


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 13), (4, 5)])
def test_hits_are_counted_over_ranks(pool: Pool, num_ranks: int, vocab_size: int) -> None:
    for found, alone, expected in pool.run(f"{__name__}:hits", num_ranks, {"vocab_size": vocab_size}):
        assert found == alone == expected > 5


def loss_bits(labels: str) -> list[float]:
    axis = world_axis()
    logits, labels_BT = logits_and_labels(14, 14, torch.float32)
    if labels == "ignored":
        labels_BT = torch.full_like(labels_BT, IGNORED)
    here = logits.chunk(axis.size, dim=-1)[axis.index].clone()
    if labels == "nan on one rank" and axis.index == 1:
        here[0, 0, 0] = float("nan")
    here.requires_grad_()
    loss = cross_entropy_sum(here, labels_BT, axis)
    torch.autograd.backward(loss)
    assert here.grad is not None
    return [float(loss.detach()), float(here.grad.abs().sum())]


def test_every_rank_has_the_same_loss_to_the_bit(pool: Pool) -> None:
    (first, _), (second, _) = pool.run(f"{__name__}:loss_bits", 2, {"labels": "some"})
    assert first == second > 0


def test_nothing_to_predict_is_no_loss(pool: Pool) -> None:
    assert pool.run(f"{__name__}:loss_bits", 2, {"labels": "ignored"}) == [[0.0, 0.0]] * 2


def test_a_broken_number_on_one_rank_reaches_all(pool: Pool) -> None:
    """An overflow must be seen by every rank, or some would skip a step that others take."""
    for loss, gradient in pool.run(f"{__name__}:loss_bits", 2, {"labels": "nan on one rank"}):
        assert loss != loss
        assert gradient != gradient


def sent_for_a_loss(num_rows: int, columns: int) -> list[list[Any]]:
    """Every collective of a forward and backward, with how many numbers a rank puts in."""
    axis = world_axis()
    logits = torch.randn(num_rows, columns, requires_grad=True)
    labels = torch.arange(num_rows) % (columns * axis.size)
    with Record() as record:
        torch.autograd.backward(cross_entropy_sum(logits, labels, axis))
    return [[name, args[1].numel()] for namespace, name, args in record.calls if namespace == "c10d"]


def test_three_numbers_a_row_are_sent_and_no_logits(pool: Pool) -> None:
    assert (
        pool.run(f"{__name__}:sent_for_a_loss", 2, {"num_rows": 12, "columns": 50})
        == [[["_allgather_base_", 3 * 12]]] * 2
    )


@pytest.mark.parametrize(("num_rows", "size", "rows"), [(128, 4, 32), (13, 2, 7), (13, 8, 2), (3, 4, 1)])
def test_rows_are_padded_until_every_rank_has_as_many(num_rows: int, size: int, rows: int) -> None:
    assert rows_per_rank(num_rows, size) == rows


def scores_of_labels(vocab_size: int) -> list[list[float]]:
    """By cut columns and by whole ones: scores and which label is the first of the highest. Many logits are alike."""
    axis = world_axis()
    rows = rows_per_rank(vocab_size, axis.size)
    generator = torch.Generator().manual_seed(9)
    whole = torch.randint(3, (400, rows * axis.size), generator=generator).double()
    whole[:, vocab_size:] = float("-inf")
    labels = torch.randint(vocab_size, (400,), generator=generator)
    mine = whole[:, axis.index * rows : (axis.index + 1) * rows]
    found = label_scores(lambda some: some, mine, labels, axis)
    expected = whole.logsumexp(-1) - whole.gather(-1, labels[:, None])[:, 0]
    return [(found[0] - expected).tolist(), found[1].tolist(), (whole.argmax(-1) == labels).double().tolist()]


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 7), (4, 5)])  # 5 over 4: a rank of nothing but padding
def test_labels_that_score_alike_and_padding_are_judged_as_on_one_process(
    pool: Pool, num_ranks: int, vocab_size: int
) -> None:
    for differences, best, expected in pool.run(f"{__name__}:scores_of_labels", num_ranks, {"vocab_size": vocab_size}):
        assert np.abs(differences).max() < 1e-14
        assert best == expected
        assert 20 < sum(expected) < 200


def test_the_sum_over_a_large_vocabulary_is_made_in_float64() -> None:
    """Though the logits are fp32, as are their exponentials: a corpus adds millions of such scores."""
    logits = torch.randn(40, 50_000, generator=torch.Generator().manual_seed(3)) * 4
    labels = torch.arange(40)
    found = label_scores(lambda some: some, logits, labels, Axis())[0]
    right = -logits.double().log_softmax(-1)[torch.arange(40), labels]
    assert (found - right).abs().max() < 4e-8  # 1.7e-7 by sums in fp32
