"""A linear's three products: its outputs, the gradient of its input, and that of its weight, which is the costly one.

Called by apply, tensor and collectives. Where weights compute in half precision the third product adds to an fp32 sum
by itself (`total`): no half-precision gradient is written, read and added. Whoever owns the weights says when a module
has a total (precision, sharding); a module without one gives its gradient to autograd. Either may be put off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.models.layers.heads import Head, added_to_scores
from lmtrain.spec import LanguageModel

Later = Callable[[], None]

_open: list[list[Later]] = []  # of the whole process, since autograd may run backward in threads of its own
# because: on a GPU one kernel multiplies half-precision factors and adds to fp32; elsewhere that takes copies in fp32
SUMMED_ON = {"cuda"}
FIRST_CAPABILITY = (8, 0)  # because: cuBLAS has no such product for older GPUs (V100, T4), and torch refuses it


@contextmanager
def put_off(queue: list[Later]) -> Iterator[None]:
    _open.append(queue)
    try:
        yield
    finally:
        _open.pop()


def weight_gradient(weight: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
    """Return a weight's gradient; None while a queue is open, which adds the gradient later through the same hooks."""
    if not _open:
        return product()
    with torch.enable_grad():
        alias = weight.view_as(weight)  # a backward through it ends in the weight's own accumulation
    _open[-1].append(lambda: torch.autograd.backward(alias, product()))
    return None


class Summing(nn.Module):
    """A module with a weight of two dims that is one factor of a product and no more."""

    weight: nn.Parameter
    total: Tensor | None = None  # fp32, what the weight's gradients are added to


class OwnLinear(Summing):
    """The same linear, or head, around the same weights."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        assert isinstance(plain.weight, nn.Parameter)
        self.weight, self.bias = plain.weight, plain.bias
        self.num_true = plain.vocab_size if isinstance(plain, Head) else plain.out_features

    def forward(self, x: Tensor, *, biased: bool = True) -> Tensor:
        bias = added_to_scores(self.weight, self.bias, self.num_true) if biased else None
        y: Tensor = _Linear.apply(x, self.weight, bias, self.total)  # type: ignore[no-untyped-call]
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total  # because: autograd would mind that another microbatch has added to what is saved
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = weight_product(weight, ctx.total, rows, x.flatten(0, -2))
        return grad @ weight, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def weight_product(weight: Tensor, total: Tensor | None, rows: Tensor, inputs: Tensor) -> Tensor | None:
    """rows^T inputs, the gradient of a weight, for autograd; None where it is added to `total`, or put off."""
    if total is None:
        return weight_gradient(weight, lambda: rows.t() @ inputs)
    if _open:
        _open[-1].append(lambda: add_product(total, rows, inputs))
    else:
        add_product(total, rows, inputs)
    return None


def add_product(total: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add rows^T inputs to total, with products and sums in fp32."""
    if torch.compiler.is_compiling():
        _add_product_in_graph(total, rows, inputs)
    else:  # because: an operator of Python's costs the host some 20 us a call
        _add_product(total, rows, inputs)


@torch.no_grad()
def _add_product(total: Tensor, rows: Tensor, inputs: Tensor) -> None:
    if total.is_cuda:
        torch.addmm(total, rows.t(), inputs, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(rows.t().float(), inputs.float())


# because: a compiler keeps an operator that says what it changes, and changes the sum in place, where plain torch would
# have to cast the factors first
_add_product_in_graph = torch.library.custom_op(
    "lmtrain::add_product", _add_product, mutates_args=("total",),
    schema="(Tensor(a!) total, Tensor rows, Tensor inputs) -> ()",
)  # fmt: skip


def sums_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products can add to fp32 sums by themselves on this device."""
    if device.type not in SUMMED_ON or dtype not in (torch.bfloat16, torch.float16):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def summing(model: nn.Module | LanguageModel) -> list[Summing]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, Summing)]


def apply_own_linears(model: nn.Module) -> str:
    """Plain linears, in place; those cut over tp do the same by themselves. Says so for the log."""
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    for path, module in linears:
        model.set_submodule(path, OwnLinear(module))
    return f"products of our own: {len(linears)} linears besides those cut over tp"


def clear_totals(modules: Iterable[Summing], num_microbatches: int) -> None:
    """Clear totals before the first forward of a step; a single micro-batch needs no totals."""
    for module in modules:
        if num_microbatches == 1:
            module.total = None
        elif module.total is None:
            weight = module.weight
            module.total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        else:
            module.total.zero_()
