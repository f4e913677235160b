"""A linear's bias and activation fused into a single pass per direction; backward also returns the bias's gradient.

Called by models, with the product of a linear without its bias. Torch and its compiler read the activation's gradient a
second time to sum it for the bias, because that sum runs across rows. The fallbacks do the same arithmetic in fp32.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.kernels.kernel_support import can_run_kernel

Activation = Literal["gelu", "gelu_tanh", "swiglu"]
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def activate_with_bias(product: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
    """Return f(product + bias), where f is the activation `kind` and `product` a linear's output without its bias. For
    swiglu f is silu(gate) * up of [gate | up] in the last dim.
    """
    y: Tensor = _ActivateWithBias.apply(product, bias, kind)  # type: ignore[no-untyped-call]
    return y


class _ActivateWithBias(torch.autograd.Function):
    """The autograd function of `activate_with_bias`."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
        ctx.save_for_backward(product, bias)
        ctx.kind = kind
        return (_forward_in_graph if torch.compiler.is_compiling() else forward)(product, bias, kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        product, bias = ctx.saved_tensors
        function = _backward_in_graph if torch.compiler.is_compiling() else backward
        grad, grad_bias = function(grads[0].contiguous(), product, bias, ctx.kind)
        return grad, None if bias is None else grad_bias, None


def forward(product: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Return f(product + bias), where f is the activation `kind`: gelu, gelu_tanh or swiglu, which halves the last dim.
    Runs a Triton kernel if it can process the tensor, otherwise torch operations.
    """
    if can_run_kernel(product):
        from lmtrain.kernels import triton_activations  # because: Triton is installed only with a CUDA torch

        return triton_activations.forward(product, bias, kind)
    return forward_in_torch(product, bias, kind)


def backward(grad: Tensor, product: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of `product` and of `bias` in `forward`, given `grad`, the gradient of its output. The
    second is empty if there is no bias. Runs a Triton kernel if it can process the tensor, otherwise torch operations.
    """
    if can_run_kernel(product):
        from lmtrain.kernels import triton_activations  # because: Triton is installed only with a CUDA torch

        return triton_activations.backward(grad, product, bias, kind)
    return backward_in_torch(grad, product, bias, kind)


def forward_in_torch(product: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Return f(product + bias), where f is the activation `kind`: gelu, gelu_tanh or swiglu. Uses torch operations, on
    any device.
    """
    x = _add_bias(product, bias)
    if kind == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate) * up).to(product.dtype)
    return F.gelu(x, approximate=_APPROXIMATE[kind]).to(product.dtype)


def backward_in_torch(grad: Tensor, product: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of `product` and of `bias` (empty if there is none) in `forward`, given `grad`, the gradient
    of its output. Uses torch operations, on any device.
    """
    x = _add_bias(product, bias)
    grad = grad.to(x.dtype)
    if kind == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)], dim=-1)
    else:
        grad_x = torch.ops.aten.gelu_backward(grad, x, approximate=_APPROXIMATE[kind])
    grad_bias = product.new_empty(0) if bias is None else grad_x.flatten(0, -2).sum(0).to(bias.dtype)
    return grad_x.to(product.dtype), grad_bias


def _add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """Return product + bias in at least fp32."""
    x = product.to(torch.promote_types(product.dtype, torch.float32))
    return x if bias is None else x + bias


# because: torch.compile cannot trace into a Triton kernel; a custom operator gives it the output shapes
_forward_in_graph = torch.library.custom_op(
    "lmtrain::activated", forward, mutates_args=(), schema="(Tensor product, Tensor? bias, str kind) -> Tensor"
)
_backward_in_graph = torch.library.custom_op(
    "lmtrain::activated_backward", backward, mutates_args=(),
    schema="(Tensor grad, Tensor product, Tensor? bias, str kind) -> (Tensor, Tensor)",
)  # fmt: skip


@_forward_in_graph.register_fake
def _(product: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    width = product.shape[-1] // (2 if kind == "swiglu" else 1)
    return product.new_empty(*product.shape[:-1], width)


@_backward_in_graph.register_fake
def _(grad: Tensor, product: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(product), product.new_empty(0) if bias is None else torch.empty_like(bias)
