"""The norm and the clipping against torch's own, with and without a loss scale."""

from __future__ import annotations

import math

import pytest
import torch

from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.weights.reduce_and_clip_gradients import apply_clip, gradient_norm


def norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """On one process, where places do not matter."""
    return gradient_norm({str(number): gradient for number, gradient in enumerate(gradients)}, {}, Axis())


def gradients(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(5, 3), torch.randn(7), torch.randn(2, 2, 2)]


def test_the_norm_is_that_of_one_long_vector() -> None:
    found = gradients(0)
    assert norm_of(found).item() == pytest.approx(torch.cat([g.flatten() for g in found]).norm().item(), rel=1e-6)


def test_a_large_weights_squares_are_not_lost_beside_their_sum() -> None:
    """Torch's own norm of the first errs by 1e-5 on a CPU, which adds four million squares up in fp32."""
    found = [torch.rand(1000, 4000, generator=torch.Generator().manual_seed(3)) + 0.5, *gradients(0)]
    exact = math.sqrt(sum(g.double().square().sum().item() for g in found))
    assert norm_of(found).item() == pytest.approx(exact, rel=5e-7)


@pytest.mark.parametrize("clip_norm", [0.5, 1e6, None])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_clipping_equals_torchs_after_unscaling(clip_norm: float | None, loss_scale: float) -> None:
    expected, found = gradients(1), [g * loss_scale for g in gradients(1)]
    weights = [torch.nn.Parameter(torch.zeros_like(g)) for g in expected]
    for weight, gradient in zip(weights, expected, strict=True):
        weight.grad = gradient
    torch.nn.utils.clip_grad_norm_(weights, clip_norm if clip_norm is not None else math.inf)
    apply_clip(found, norm_of(found), clip_norm, loss_scale)
    for ours, weight in zip(found, weights, strict=True):
        torch.testing.assert_close(ours, weight.grad, rtol=2e-6, atol=1e-7)


def test_an_overflow_stays_visible() -> None:
    found = [torch.tensor([1.0, math.inf])]
    assert not math.isfinite(norm_of(found).item())
