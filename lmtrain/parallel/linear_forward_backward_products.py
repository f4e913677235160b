"""The three matrix products of a linear: output, input gradient and weight gradient, the most costly.

Called by build_parallel, tensor_parallel and tp_linears_and_collectives. In half precision the weight-gradient product
adds to an fp32 sum directly (`gradient_total`), so that no half-precision gradient is written, read and added. The
owner of the weights decides which modules have a total (master_weights, fsdp_sharding); a module without a total
returns its gradient to autograd. Either form can be deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.models.layers.output_heads import Head, padded_bias
from lmtrain.spec import LanguageModel

DeferredProduct = Callable[[], None]

# a stack of the queues of `defer_products`; global to the process, because autograd may run backward in its own threads
_open_queues: list[list[DeferredProduct]] = []
# because: a GPU kernel multiplies half-precision factors and adds to fp32; other devices need fp32 copies of both
SUMMING_DEVICES = {"cuda"}
MIN_CAPABILITY = (8, 0)  # because: cuBLAS has no such product for older GPUs (V100, T4), and torch raises an error


@contextmanager
def defer_products(queue: list[DeferredProduct]) -> Iterator[None]:
    """Postpone the weight gradients of linears while the context is open: their backward does not compute them, but
    appends to `queue` functions without arguments that do.
    """
    _open_queues.append(queue)
    try:
        yield
    finally:
        _open_queues.pop()


def compute_or_defer(weight: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
    """Return `product()`, the gradient of `weight`. Within `defer_products` return None instead, and append to the open
    queue a function that adds this gradient to `weight.grad`.

    A deferred gradient reaches the weight through autograd, so that its hooks run.
    """
    if not _open_queues:
        return product()
    with torch.enable_grad():
        alias = weight.view_as(weight)  # a backward through the alias accumulates into the weight's gradient
    _open_queues[-1].append(lambda: torch.autograd.backward(alias, product()))
    return None


class SummingModule(nn.Module):
    """The base of modules whose 2-dim weight is used only in a matrix product, so that its gradient can be summed."""

    weight: nn.Parameter
    gradient_total: Tensor | None = None  # fp32 sum of the weight's gradients, or None


class SummingLinear(SummingModule):
    """A replacement of a linear or head, with its weights, whose weight gradient can be summed in fp32 or deferred."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert isinstance(linear.weight, nn.Parameter)
        self.weight, self.bias = linear.weight, linear.bias
        self.num_tokens = linear.vocab_size if isinstance(linear, Head) else linear.out_features

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        bias = padded_bias(self.weight, self.bias, self.num_tokens) if add_bias else None
        y: Tensor = _Linear.apply(x, self.weight, bias, self.gradient_total)  # type: ignore[no-untyped-call]
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradient_total: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient_total = gradient_total  # because: saved tensors must not change, and other micro-batches add to it
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_rows = grad.flatten(0, -2)
        grad_weight = weight_gradient(weight, ctx.gradient_total, grad_rows, x.flatten(0, -2))
        return grad @ weight, grad_weight, grad_rows.sum(0) if ctx.needs_input_grad[2] else None, None


def weight_gradient(
    weight: Tensor, gradient_total: Tensor | None, grad_rows: Tensor, input_rows: Tensor
) -> Tensor | None:
    """Return the gradient of a linear's weight for autograd, `grad_rows^T input_rows`. Return None instead if it is
    added to the fp32 sum `gradient_total`, or if an open `defer_products` postpones it. `grad_rows` [N, out] is the
    gradient of the linear's outputs, `input_rows` [N, in] its inputs.
    """
    if gradient_total is None:
        return compute_or_defer(weight, lambda: grad_rows.t() @ input_rows)
    if _open_queues:
        _open_queues[-1].append(lambda: add_product(gradient_total, grad_rows, input_rows))
    else:
        add_product(gradient_total, grad_rows, input_rows)
    return None


def add_product(gradient_total: Tensor, grad_rows: Tensor, input_rows: Tensor) -> None:
    """Add `grad_rows^T input_rows`, a weight's gradient, to the fp32 tensor `gradient_total` in place, without rounding
    the product to half precision.
    """
    if torch.compiler.is_compiling():
        _add_product_in_graph(gradient_total, grad_rows, input_rows)
    else:  # because: a custom operator in Python costs the host about 20 us per call
        _add_product(gradient_total, grad_rows, input_rows)


@torch.no_grad()
def _add_product(gradient_total: Tensor, grad_rows: Tensor, input_rows: Tensor) -> None:
    if gradient_total.is_cuda:
        torch.addmm(gradient_total, grad_rows.t(), input_rows, out_dtype=torch.float32, out=gradient_total)
    else:
        gradient_total.addmm_(grad_rows.t().float(), input_rows.float())


# because: the compiler keeps a custom operator with declared mutations and updates the sum in place; with plain torch
# operations the factors would have to be cast first
_add_product_in_graph = torch.library.custom_op(
    "lmtrain::add_product", _add_product, mutates_args=("gradient_total",),
    schema="(Tensor(a!) gradient_total, Tensor grad_rows, Tensor input_rows) -> ()",
)  # fmt: skip


def can_sum_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the device can multiply factors of this dtype and add the product to an fp32 tensor in one
    operation. Only half precision on a GPU of compute capability 8.0 or more can.
    """
    if device.type not in SUMMING_DEVICES or dtype not in (torch.bfloat16, torch.float16):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def summing_modules(model: nn.Module | LanguageModel) -> list[SummingModule]:
    """Return the model's modules whose weight gradients can be summed in fp32."""
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, SummingModule)]


def apply_summing_linears(model: nn.Module) -> str:
    """Replace every nn.Linear of the model by a SummingLinear with the same weights, in place. Return a line for the
    log.

    Tensor-parallel linears are SummingModules already.
    """
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    for path, module in linears:
        model.set_submodule(path, SummingLinear(module))
    return f"products: {len(linears)} linears that can sum or defer weight gradients, besides tensor-parallel ones"


def reset_gradient_totals(modules: Iterable[SummingModule], num_microbatches: int) -> None:
    """Prepare the fp32 gradient sums of the modules before a step's first forward: zeros, or None if the step has a
    single micro-batch and nothing to sum.
    """
    for module in modules:
        if num_microbatches == 1:
            module.gradient_total = None
        elif module.gradient_total is None:
            weight = module.weight
            module.gradient_total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        else:
            module.gradient_total.zero_()
