"""The three matrix products of a linear: output, input gradient and weight gradient, the most costly.

Called by apply, tensor and collectives. In half precision the weight-gradient product adds to an fp32 sum directly
(`total`), so that no half-precision gradient is written, read and added. The owner of the weights decides which modules
have a total (precision, sharding); a module without a total returns its gradient to autograd. Either form can be
deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.models.layers.heads import Head, padded_bias
from lmtrain.spec import LanguageModel

Later = Callable[[], None]

_open: list[list[Later]] = []  # global to the process, because autograd may run backward in its own threads
# because: a GPU kernel multiplies half-precision factors and adds to fp32; other devices need fp32 copies of both
SUMMED_ON = {"cuda"}
FIRST_CAPABILITY = (8, 0)  # because: cuBLAS has no such product for older GPUs (V100, T4), and torch raises an error


@contextmanager
def put_off(queue: list[Later]) -> Iterator[None]:
    """Defer weight-gradient products within the context: append them to `queue`."""
    _open.append(queue)
    try:
        yield
    finally:
        _open.pop()


def weight_gradient(weight: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
    """Return the gradient of a weight, or None if deferred; the deferred gradient runs through the same hooks."""
    if not _open:
        return product()
    with torch.enable_grad():
        alias = weight.view_as(weight)  # a backward through the alias accumulates into the weight's gradient
    _open[-1].append(lambda: torch.autograd.backward(alias, product()))
    return None


class Summing(nn.Module):
    """A module whose 2-dim weight is used only as a factor of a matrix product."""

    weight: nn.Parameter
    total: Tensor | None = None  # fp32 sum of the weight's gradients, or None


class OwnLinear(Summing):
    """A linear or head with the weights of the module it replaces, whose weight gradient can be summed or deferred."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        assert isinstance(plain.weight, nn.Parameter)
        self.weight, self.bias = plain.weight, plain.bias
        self.num_true = plain.vocab_size if isinstance(plain, Head) else plain.out_features

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        bias = padded_bias(self.weight, self.bias, self.num_true) if add_bias else None
        y: Tensor = _Linear.apply(x, self.weight, bias, self.total)  # type: ignore[no-untyped-call]
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total  # because: saved tensors must not change, and other micro-batches add to it
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = weight_product(weight, ctx.total, rows, x.flatten(0, -2))
        return grad @ weight, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def weight_product(weight: Tensor, total: Tensor | None, rows: Tensor, inputs: Tensor) -> Tensor | None:
    """Return rows^T inputs, a weight's gradient, for autograd; None if added to `total` or deferred."""
    if total is None:
        return weight_gradient(weight, lambda: rows.t() @ inputs)
    if _open:
        _open[-1].append(lambda: add_product(total, rows, inputs))
    else:
        add_product(total, rows, inputs)
    return None


def add_product(total: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Compute total += rows^T inputs, with products and sums in fp32."""
    if torch.compiler.is_compiling():
        _add_product_in_graph(total, rows, inputs)
    else:  # because: a custom operator in Python costs the host about 20 us per call
        _add_product(total, rows, inputs)


@torch.no_grad()
def _add_product(total: Tensor, rows: Tensor, inputs: Tensor) -> None:
    if total.is_cuda:
        torch.addmm(total, rows.t(), inputs, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(rows.t().float(), inputs.float())


# because: the compiler keeps a custom operator with declared mutations and updates the sum in place; with plain torch
# operations the factors would have to be cast first
_add_product_in_graph = torch.library.custom_op(
    "lmtrain::add_product", _add_product, mutates_args=("total",),
    schema="(Tensor(a!) total, Tensor rows, Tensor inputs) -> ()",
)  # fmt: skip


def sums_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if weight-gradient products add to fp32 sums directly for this device and dtype."""
    if device.type not in SUMMED_ON or dtype not in (torch.bfloat16, torch.float16):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def summing(model: nn.Module | LanguageModel) -> list[Summing]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, Summing)]


def apply_own_linears(model: nn.Module) -> str:
    """Replace plain linears in place; tensor-parallel linears have the same feature. Return the log line."""
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    for path, module in linears:
        model.set_submodule(path, OwnLinear(module))
    return f"products of our own: {len(linears)} linears besides those cut over tp"


def clear_totals(modules: Iterable[Summing], num_microbatches: int) -> None:
    """Reset the fp32 sums before a step's first forward. With a single micro-batch modules have no totals."""
    for module in modules:
        if num_microbatches == 1:
            module.total = None
        elif module.total is None:
            weight = module.weight
            module.total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        else:
            module.total.zero_()
