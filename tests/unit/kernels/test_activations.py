"""A linear's bias and activation in one pass: values and gradients are torch's, alone, in an MLP and compiled."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.kernels import triton_availability
from lmtrain.kernels.activations import Activation, activate_with_bias
from lmtrain.models.layers.block import MLP, UpLinear, activate
from lmtrain.parallel.linear_forward_backward_products import SummingLinear, apply_summing_linears
from tests.marks import wide

# a kind and whether it is gated: each kind once, and the gates of two
COMMON: tuple[tuple[Activation, bool], ...] = ("gelu", False), ("gelu_tanh", False), ("silu", True)
OTHERS: tuple[tuple[Activation, bool], ...] = ("silu", False), ("relu", False), ("relu2", False), ("gelu_tanh", True)
KINDS = COMMON + OTHERS


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(y: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, of, drawn(*y.shape, dtype=y.dtype, seed=9))


@pytest.mark.parametrize(("kind", "gated"), KINDS)
def test_equals_torch(kind: Activation, gated: bool) -> None:
    product, bias = drawn(3, 5, 14).requires_grad_(), drawn(14, seed=1).requires_grad_()
    ours = activate_with_bias(product, bias, kind, gated=gated)
    right = activate(product + bias, kind, gated=gated)
    pairs = zip((ours, *gradients(ours, product, bias)), (right, *gradients(right, product, bias)), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    bare, right = activate_with_bias(product, None, kind, gated=gated), activate(product, kind, gated=gated)
    torch.testing.assert_close(bare, right, rtol=1e-12, atol=1e-12)
    assert torch.equal(gradients(bare, product)[0], gradients(right, product)[0])


def test_half_precision_is_rounded_once() -> None:
    product, bias = drawn(64, 32, dtype=torch.bfloat16), drawn(32, dtype=torch.bfloat16, seed=1).requires_grad_()
    exact = F.gelu(product.double() + bias.double())
    assert is_close(activate_with_bias(product, bias, "gelu"), exact)
    assert not is_close(F.gelu(product + bias), exact)  # the sum, and what is made of it
    (of_bias,) = gradients(activate_with_bias(product, bias, "gelu"), bias)
    twin = bias.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(F.gelu(product.double() + twin), twin, drawn(64, 32, dtype=torch.bfloat16, seed=9))
    assert is_close(of_bias, right)


def is_close(found: Tensor, right: Tensor) -> bool:
    """As close as bf16 can be."""
    return torch.allclose(found.double(), right.double(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "gated"), KINDS)
def test_an_mlp_takes_this_way_where_kernels_run(
    kind: Activation, gated: bool, bias: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = MLP(8, 12, kind, gated=gated, bias=bias, dropout=0.0)
    fused = deepcopy(plain)
    if own:
        apply_summing_linears(fused)
    assert type(fused.up) is (SummingLinear if own else UpLinear)
    x = drawn(3, 5, 8, dtype=torch.float32).requires_grad_()
    expected = plain(x)
    right = gradients(expected, x, *plain.parameters())
    monkeypatch.setattr(triton_availability, "FUSED_DEVICES", {"cpu"})
    found = fused(x)
    assert "_ActivateWithBiasBackward" in names_of(found)
    assert "_ActivateWithBiasBackward" not in names_of(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    order = [name for name, _ in plain.named_parameters()]
    ours = dict(fused.named_parameters())
    for one, other in zip(gradients(found, x, *(ours[name] for name in order)), right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def names_of(tensor: Tensor) -> set[str]:
    """Of the nodes of its graph."""
    found, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.add(node.name())
            left += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize(("kind", "gated"), [*COMMON, *wide(*OTHERS)])
def test_compiles_to_one_graph(kind: Activation, gated: bool) -> None:
    product, bias = drawn(6, 14).requires_grad_(), drawn(14, seed=1).requires_grad_()
    compiled = torch.compile(activate_with_bias, fullgraph=True, dynamic=False, backend="aot_eager")
    ours, right = (of(product, bias, kind, gated=gated) for of in (compiled, activate_with_bias))
    assert torch.equal(ours, right)
    for found, expected in zip(gradients(ours, product, bias), gradients(right, product, bias), strict=True):
        assert torch.equal(found, expected)


def test_a_wrong_bias_is_noticed() -> None:
    """What the tests above compare with sees a bias that is left out, and its gradient."""
    product, bias = drawn(3, 14), drawn(14, seed=1)
    assert not torch.allclose(activate_with_bias(product, None, "gelu"), F.gelu(product + bias), rtol=1e-3)


@pytest.mark.parametrize(("kind", "gated"), [*COMMON, *wide(*OTHERS)])
def test_an_mlp_compiles_to_one_graph(kind: Activation, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_availability, "FUSED_DEVICES", {"cpu"})
    torch.manual_seed(0)
    mlp, x = MLP(8, 12, kind, gated=gated, bias=True, dropout=0.0), drawn(3, 5, 8, dtype=torch.float32)
    compiled = torch.compile(mlp, fullgraph=True, dynamic=False, backend="aot_eager")
    ours, plain = (gradients(of(x), *mlp.parameters()) for of in (compiled, mlp))
    for found, right in zip(ours, plain, strict=True):
        assert torch.equal(found, right)
