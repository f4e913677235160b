"""A linear's bias and activation fused into a single pass per direction; backward also returns the bias's gradient.

Called by models, with the product of a linear without its bias. Torch and its compiler read the activation's gradient a
second time to sum it for the bias, because that sum runs across rows. The fallbacks do the same arithmetic in fp32.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.kernels.triton_availability import can_run_kernel

Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu2"]
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def activate_with_bias(product: Tensor, bias: Tensor | None, kind: Activation, *, gated: bool = False) -> Tensor:
    """Return f(product + bias), where f is the activation `kind` and `product` a linear's output without its bias. If
    `gated`, return f(gate) * up of [gate | up] in the last dim of the sum.
    """
    y: Tensor = _ActivateWithBias.apply(product, bias, kind, gated)  # type: ignore[no-untyped-call]
    return y


class _ActivateWithBias(torch.autograd.Function):
    """The autograd function of `activate_with_bias`."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor | None, kind: Activation, gated: bool) -> Tensor:
        ctx.save_for_backward(product, bias)
        ctx.form = kind, gated
        return (_forward_in_graph if torch.compiler.is_compiling() else forward)(product, bias, kind, gated)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        product, bias = ctx.saved_tensors
        function = _backward_in_graph if torch.compiler.is_compiling() else backward
        grad, grad_bias = function(grads[0].contiguous(), product, bias, *ctx.form)
        return grad, None if bias is None else grad_bias, None, None


def forward(product: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
    """Return f(product + bias), where f is the activation `kind`; if `gated`, return f(gate) * up of [gate | up] in the
    last dim of the sum. A Triton kernel computes it if it can process the tensor, otherwise torch operations.
    """
    if can_run_kernel(product):
        from lmtrain.kernels import triton_activations  # because: Triton is installed only with a CUDA torch

        return triton_activations.forward(product, bias, kind, gated)
    return forward_in_torch(product, bias, kind, gated)


def backward(grad: Tensor, product: Tensor, bias: Tensor | None, kind: str, gated: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of `product` and of `bias` in `forward`, given `grad`, the gradient of its output. The
    second is an empty tensor if `bias` is None. A Triton kernel computes them if it can process the tensor, otherwise
    torch operations.
    """
    if can_run_kernel(product):
        from lmtrain.kernels import triton_activations  # because: Triton is installed only with a CUDA torch

        return triton_activations.backward(grad, product, bias, kind, gated)
    return backward_in_torch(grad, product, bias, kind, gated)


def forward_in_torch(product: Tensor, bias: Tensor | None, kind: str, gated: bool = False) -> Tensor:
    """Return f(product + bias), or the gated form of it, as `forward` does, by torch operations on any device."""
    x = _add_bias(product, bias)
    if gated:
        gate, up = x.chunk(2, dim=-1)
        return (_activate(gate, kind) * up).to(product.dtype)
    return _activate(x, kind).to(product.dtype)


def backward_in_torch(
    grad: Tensor, product: Tensor, bias: Tensor | None, kind: str, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `product` and of `bias` in `forward`, given `grad`, the gradient of its output, by torch
    operations on any device. The second is an empty tensor if `bias` is None.
    """
    x = _add_bias(product, bias)
    grad = grad.to(x.dtype)
    if gated:
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.cat([_activate_backward(grad * up, gate, kind), grad * _activate(gate, kind)], dim=-1)
    else:
        grad_x = _activate_backward(grad, x, kind)
    grad_bias = product.new_empty(0) if bias is None else grad_x.flatten(0, -2).sum(0).to(bias.dtype)
    return grad_x.to(product.dtype), grad_bias


def _activate(x: Tensor, kind: str) -> Tensor:
    match kind:
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
    return F.gelu(x, approximate=_APPROXIMATE[kind])


def _activate_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    """Return the gradient of `x`, given `grad`, the gradient of f(x), where f is the activation `kind`."""
    match kind:
        case "silu":
            y: Tensor = torch.ops.aten.silu_backward(grad, x)
        case "relu":
            y = torch.ops.aten.threshold_backward(grad, x, 0)
        case "relu2":
            y = grad * 2 * F.relu(x)
        case _:
            y = torch.ops.aten.gelu_backward(grad, x, approximate=_APPROXIMATE[kind])
    return y


def _add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """Return product + bias in at least fp32."""
    x = product.to(torch.promote_types(product.dtype, torch.float32))
    return x if bias is None else x + bias


# because: torch.compile cannot trace into a Triton kernel; a custom operator gives it the output shapes
_forward_in_graph = torch.library.custom_op(
    "lmtrain::activated", forward, mutates_args=(),
    schema="(Tensor product, Tensor? bias, str kind, bool gated) -> Tensor",
)  # fmt: skip
_backward_in_graph = torch.library.custom_op(
    "lmtrain::activated_backward", backward, mutates_args=(),
    schema="(Tensor grad, Tensor product, Tensor? bias, str kind, bool gated) -> (Tensor, Tensor)",
)  # fmt: skip


@_forward_in_graph.register_fake
def _(product: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
    width = product.shape[-1] // (2 if gated else 1)
    return product.new_empty(*product.shape[:-1], width)


@_backward_in_graph.register_fake
def _(grad: Tensor, product: Tensor, bias: Tensor | None, kind: str, gated: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(product), product.new_empty(0) if bias is None else torch.empty_like(bias)
