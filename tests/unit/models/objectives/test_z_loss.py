"""The z-loss in every implementation of the loss: its number, and the gradient of it and the cross-entropy together."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.batch import IGNORED, Batch
from lmtrain.kernels import cross_entropy as room
from lmtrain.kernels import triton_availability
from lmtrain.models.gpt import build
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.objectives.causal_and_masked_objectives import CausalLM
from lmtrain.models.objectives.cross_entropy import cross_entropy_plain, cross_entropy_sum
from lmtrain.parallel import tensor_parallel
from lmtrain.parallel.mesh import Axis

Z_LOSS = 0.01
LOSSES: dict[str, Callable[..., Tensor]] = {
    "eager": cross_entropy_sum,
    "fused": cross_entropy_sum,
    "for_a_compiler": cross_entropy_plain,
    "cut_over_tp": partial(tensor_parallel.cross_entropy_sum, axis=Axis()),
}


@pytest.fixture(params=LOSSES)
def loss(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    # a vocabulary that is cut into one part needs no collective
    monkeypatch.setattr(tensor_parallel, "gather_stack", lambda x, axis: x[None])
    if request.param == "fused":
        monkeypatch.setattr(triton_availability, "FUSED_DEVICES", {"cpu"})
    return LOSSES[request.param]


def example(dtype: torch.dtype, shift: float) -> tuple[Tensor, Tensor]:
    """Four samples with a padded vocabulary; one has no label. The logs of the sums lie near `shift`."""
    chance = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 37, (4, 6), generator=chance)
    labels[1, 2] = labels[3] = IGNORED
    logits = (5 * torch.randn(4, 6, 40, generator=chance) + shift).to(dtype)
    logits[..., 37:] = -math.inf
    return logits.requires_grad_(), labels


def plain(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and z-loss in fp64."""
    logits_NV, labels_N = logits.double().flatten(0, -2), labels.flatten()
    z = Z_LOSS * logits_NV.logsumexp(-1)[labels_N != IGNORED].square().sum()
    return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum"), z


@pytest.mark.parametrize("chunk", [1 << 26, 120])
@pytest.mark.parametrize("shift", [0.0, -60.0])  # a factor of the softmax above 0, and one below
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_and_gradient(
    loss: Callable[..., Tensor], dtype: torch.dtype, shift: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "CHUNK_ELEMENTS", chunk)
    logits, labels = example(dtype, shift)
    without = loss(logits, labels, num_samples=4)
    sums = loss(logits, labels, num_samples=4, z_loss=Z_LOSS)
    expected, z = plain(logits, labels)
    assert sums.shape == (6,)
    assert torch.equal(sums[0], without[0])
    assert torch.equal(sums[2:], without[1:])
    assert sums[1].item() == pytest.approx(z.item(), rel=1e-6)
    (right,) = torch.autograd.grad((expected + z) * 0.37, logits)
    (gradient,) = torch.autograd.grad(sums[:2].sum() * 0.37, logits)
    assert torch.allclose(gradient, right, rtol=0, atol=2e-6 if dtype is torch.float32 else 1e-2)
    assert (gradient[3] == 0).all()


def test_a_log_of_the_sum_that_cancels_the_softmax(loss: Callable[..., Tensor]) -> None:
    """At log(sum) = -1 / (2 z_loss) the softmax has the factor 0, and the gradient is that of the label alone."""
    logits = torch.full((1, 8), -50.0 - math.log(8), requires_grad=True)
    sums = loss(logits, torch.tensor([3]), z_loss=Z_LOSS)
    (gradient,) = torch.autograd.grad(sums.sum(), logits)
    assert torch.allclose(gradient, -F.one_hot(torch.tensor([3]), 8).float(), atol=1e-5)


@pytest.mark.wide
def test_compiles_to_one_graph(loss: Callable[..., Tensor]) -> None:
    logits, labels = example(torch.float32, 0.0)
    compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(logits, labels, num_samples=0, z_loss=Z_LOSS).sum(), logits)
    expected, z = plain(logits, labels)
    (right,) = torch.autograd.grad(expected + z, logits)
    assert torch.allclose(gradient, right, atol=1e-6)


def test_objective_divides_both_by_the_labels() -> None:
    settings = GPTSettings(num_layers=1, width=16, num_heads=2, seq_len=8, vocab_size=50, vocab_multiple=1)
    model, objective = build(settings), CausalLM(Z_LOSS)
    tokens = torch.arange(16).view(2, 8)
    batch = Batch(tokens, tokens + 1)
    sums = objective.loss_sums(model, model(batch), batch)
    expected, z = plain(model.logits(model(batch)), batch.labels_BT)
    assert sums.tolist() == pytest.approx([expected.item(), z.item()], rel=1e-6)
    assert objective.counts_of_sums((16,)) == (16, 16)
    assert CausalLM().counts_of_sums((16,)) == (16,)
    assert objective.validation_sums(model, model(batch), batch).shape == (2, 1)
