"""Losses and hits of each sample come out beside their sums, and change neither the sums nor the gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.batch import IGNORED
from lmtrain.kernels import cross_entropy as room
from lmtrain.kernels import triton_availability
from lmtrain.models.objectives.cross_entropy import count_hits, cross_entropy_plain, cross_entropy_sum
from lmtrain.parallel import tensor_parallel
from lmtrain.parallel.mesh import Axis

LOSSES: dict[str, Callable[..., Tensor]] = {
    "eager": cross_entropy_sum,
    "fused": cross_entropy_sum,
    "for_a_compiler": cross_entropy_plain,
    "cut_over_tp": partial(tensor_parallel.cross_entropy_sum, axis=Axis()),
}
HITS: dict[str, Callable[..., Tensor]] = {"whole": count_hits, "cut": partial(tensor_parallel.count_hits, axis=Axis())}


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Four samples, of which one has no label."""
    chance = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 40, (4, 6), generator=chance)
    labels[1, 2] = labels[3] = IGNORED
    return (5 * torch.randn(4, 6, 40, generator=chance)).to(dtype).requires_grad_(), labels


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that is cut into one part needs no collective."""
    monkeypatch.setattr(tensor_parallel, "gather_stack", lambda x, axis: x[None])


@pytest.fixture(params=LOSSES)
def loss(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    if request.param == "fused":
        monkeypatch.setattr(triton_availability, "FUSED_DEVICES", {"cpu"})
    return LOSSES[request.param]


@pytest.mark.parametrize("chunk", [1 << 26, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_samples(
    loss: Callable[..., Tensor], dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "CHUNK_ELEMENTS", chunk)
    logits, labels = example(dtype)
    total = loss(logits, labels)
    sums = loss(logits, labels, num_samples=4)
    assert sums.shape == (5,)
    assert torch.equal(sums[0], total)
    expected = [
        F.cross_entropy(sample.double(), row, ignore_index=IGNORED, reduction="sum").item()
        for sample, row in zip(logits.detach(), labels, strict=True)
    ]
    assert sums[1:].tolist() == pytest.approx(expected, rel=1e-6)
    assert sums[4] == 0
    (plain,) = torch.autograd.grad(total * 0.37, logits)
    # because: of a value by sample nothing may reach the weights
    (beside,) = torch.autograd.grad(sums[0] * 0.37 + sums[1:].sum(), logits)
    assert torch.equal(plain, beside)


def test_fifty_thousand_bf16_losses_add_up_in_a_wider_type(loss: Callable[..., Tensor]) -> None:
    """The sum, the z-loss and the sums of two samples, beside float64."""
    draw = torch.Generator().manual_seed(8)
    logits = (3 * torch.randn(2, 25_000, 5, generator=draw)).to(torch.bfloat16)
    labels = torch.randint(0, 5, (2, 25_000), generator=draw)
    scores_NV = logits.double().flatten(0, 1)
    losses_N = F.cross_entropy(scores_NV, labels.flatten(), reduction="none")
    z = 0.1 * scores_NV.logsumexp(-1).square().sum().item()
    expected = [losses_N.sum().item(), z, *losses_N.view(2, -1).sum(1).tolist()]
    assert loss(logits, labels, num_samples=2, z_loss=0.1).tolist() == pytest.approx(expected, rel=5e-7)


@pytest.mark.parametrize("hits", HITS.values(), ids=HITS)
def test_fifty_thousand_hits_are_counted_one_by_one(hits: Callable[..., Tensor]) -> None:
    """bf16 would stay at 256."""
    logits = torch.eye(3, dtype=torch.bfloat16).expand(2, 8333, 3, 3).flatten(1, 2)
    labels = torch.arange(3).expand(2, 8333, 3).flatten(1)
    assert hits(logits, labels, num_samples=2).tolist() == [49_998, 24_999, 24_999]


@pytest.mark.parametrize("hits", HITS.values(), ids=HITS)
def test_hits_of_samples(hits: Callable[..., Tensor]) -> None:
    logits, labels = example(torch.float32)
    labels[0] = logits[0].argmax(-1)
    labels[2] = logits[2].argmin(-1)
    labels[1] = torch.tensor([*logits[1].argmax(-1)[:2].tolist(), IGNORED, IGNORED, IGNORED, IGNORED])
    assert hits(logits, labels, num_samples=4).tolist() == [8, 6, 2, 0, 0]
