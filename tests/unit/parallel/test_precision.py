"""fp32 masters take every half-precision gradient exactly once, and the loss scale does what fp16 needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lmtrain.parallel.device_and_precision_settings import Bf16Settings, Fp16Settings, Fp32Settings
from lmtrain.parallel.weights.master_weights import LossScale, MasterWeights


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def test_fp32_has_one_set_of_weights() -> None:
    model = linear()
    masters = MasterWeights(dict(model.named_parameters()), torch.float32)
    assert all(masters.master[name] is p for name, p in model.named_parameters())


def test_masters_keep_what_bf16_rounds_away() -> None:
    model = linear()
    before: torch.Tensor = model.weight.detach().clone()
    masters = MasterWeights(dict(model.named_parameters()), torch.bfloat16)
    assert model.weight.dtype is torch.bfloat16
    assert torch.equal(masters.master["weight"], before)
    with torch.no_grad():
        masters.master["weight"].add_(1e-6)  # far below bf16's step at this size
    masters.publish()
    assert torch.equal(model.weight, (before + 1e-6).bfloat16())
    assert torch.equal(masters.master["weight"], before + 1e-6)


def test_gradients_are_accumulated_in_fp32_and_freed() -> None:
    """The sum of many microbatches equals the fp32 sum of their bf16 gradients; accumulating in bf16 would not."""
    model = linear()
    masters = MasterWeights(dict(model.named_parameters()), torch.bfloat16)
    expected, in_bf16 = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.bfloat16)
    for _ in range(32):
        x = torch.randn(4, 8, dtype=torch.bfloat16)
        gradient = torch.autograd.grad(model(x).square().sum(), model.weight)[0]
        expected = expected + gradient.float()
        in_bf16 = in_bf16 + gradient
        torch.autograd.backward(model(x).square().sum())
        assert model.weight.grad is None
    found = masters.master["weight"].grad
    assert found is not None
    assert torch.equal(found, expected)
    assert not torch.equal(found, in_bf16.float())
    masters.clear_gradients(32)
    assert masters.master["weight"].grad is None


def test_the_loss_scale_halves_on_overflow_and_doubles_after_an_interval() -> None:
    scale = LossScale(Fp16Settings(initial_scale=8.0, growth_interval_steps=3, min_scale=2.0))
    values = []
    for overflow in (True, True, True, False, False, False, False, True):
        scale.update(overflow)
        values.append(scale.value)
    assert values == [4.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 2.0]


def test_the_loss_scale_goes_on_where_it_was_saved() -> None:
    saved = LossScale(Fp16Settings(growth_interval_steps=2))
    for overflow in (True, False):
        saved.update(overflow)
    restored = LossScale(Fp16Settings(growth_interval_steps=2))
    restored.load(saved.state())
    for one in (saved, restored):
        one.update(False)
    assert restored.value == saved.value == 65536.0


@pytest.mark.parametrize("settings", [Fp32Settings(), Bf16Settings()])
def test_only_fp16_scales(settings: Fp32Settings | Bf16Settings) -> None:
    scale = LossScale(settings)
    scale.update(True)
    assert scale.value == 1.0
    assert not scale.dynamic
