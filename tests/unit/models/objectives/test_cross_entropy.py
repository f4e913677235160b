"""The summed cross-entropy equals torch's, with infinite columns, ignored rows and in any chunking."""

from __future__ import annotations

import math

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
from lmtrain.models.objectives.cross_entropy import cross_entropy_sum


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits = 5 * torch.randn(4, 6, 40, generator=generator)
    labels = torch.randint(0, 40, (4, 6), generator=generator)
    labels[1, 2] = labels[3] = IGNORED
    return logits.to(dtype).requires_grad_(), labels


def both(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and gradient of ours and of torch's, the latter in fp32."""
    ours = cross_entropy_sum(logits, labels)
    theirs = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    (ours_grad,) = torch.autograd.grad(ours, logits)
    (theirs_grad,) = torch.autograd.grad(theirs, logits)
    return ours, theirs, ours_grad, theirs_grad


@pytest.mark.parametrize("chunk", [1 << 26, 120, 1])
def test_equals_torch(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "CHUNK_ELEMENTS", chunk)
    ours, theirs, ours_grad, theirs_grad = both(*example())
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert torch.allclose(ours_grad, theirs_grad, atol=1e-6)
    assert (ours_grad[3] == 0).all()
    assert (ours_grad[0] != 0).all()


def test_bf16_is_summed_in_fp32() -> None:
    ours, theirs, ours_grad, theirs_grad = both(*example(torch.bfloat16))
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert ours_grad.dtype == torch.bfloat16
    assert torch.equal(ours_grad, theirs_grad)


def test_infinite_columns_take_no_part() -> None:
    logits, labels = example()
    padded = torch.cat((logits, torch.full((4, 6, 9), -math.inf)), dim=-1).detach().requires_grad_()
    ours, _, ours_grad, _ = both(padded, labels)
    expected, _, expected_grad, _ = both(logits, labels)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (ours_grad[..., 40:] == 0).all()
    assert torch.allclose(ours_grad[..., :40], expected_grad, atol=1e-6)


def test_nothing_but_ignored_rows_is_zero() -> None:
    logits, labels = example()
    ours, _, ours_grad, _ = both(logits, torch.full_like(labels, IGNORED))
    assert ours.item() == 0
    assert (ours_grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_the_formula_bit_for_bit(dtype: torch.dtype) -> None:
    """However it is made in place, as zeros of ignored rows, which have no sign."""
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    labels = torch.tensor([0, 10, IGNORED, 3, 3, IGNORED])
    torch.autograd.backward(cross_entropy_sum(logits, labels) * 0.37)
    label_N1 = labels.unsqueeze(-1)
    p_NV = F.softmax(logits.detach(), dim=-1, dtype=torch.float32)
    p_NV = p_NV.add(torch.arange(11) == label_N1, alpha=-1).mul(torch.tensor(0.37) * (label_N1 != IGNORED))
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    assert logits.grad is not None
    assert torch.equal(logits.grad.view(bits), p_NV.to(dtype).view(bits))


def test_gradient_is_that_of_the_sum() -> None:
    logits, labels = example(torch.float64)
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sum(x[:2, :3, :7], labels[:2, :3].clamp(max=6)), (logits,))


def test_the_way_of_kernels_equals_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their twins, as it is taken on a GPU."""
    monkeypatch.setattr(triton_availability, "FUSED_DEVICES", {"cpu"})
    logits, labels = example()
    with torch.no_grad():
        logits[..., 35:] = -math.inf
        labels.clamp_(max=34)
    ours, theirs, ours_grad, theirs_grad = both(logits, labels)
    assert type(ours.grad_fn).__name__ == "_OverLogitsBackward"
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert torch.allclose(ours_grad, theirs_grad, atol=1e-6)
    assert (ours_grad[3] == 0).all()


def test_compiles_to_one_graph() -> None:
    logits, labels = example()
    compiled = torch.compile(cross_entropy_sum, fullgraph=True, dynamic=False, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(logits, labels), logits)
    _, _, expected, _ = both(logits, labels)
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_causal_lm_of_an_untrained_model_is_uniform() -> None:
    settings = GPTSettings(num_layers=1, width=16, num_heads=2, seq_len=8, vocab_size=50, init_std=1e-6)
    model, objective = build(settings), CausalLM()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tokens = torch.arange(16).view(2, 8)
    labels = tokens + 1
    labels[0, 0] = IGNORED
    batch = Batch(tokens, labels)
    loss = objective.loss_sums(model, model(batch), batch)
    assert loss.item() == pytest.approx(15 * math.log(50), rel=1e-6)
