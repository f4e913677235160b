"""Backward in halves, for zero-bubble schedules: a product's weight gradient is put off until there is time.

Linears are swapped in by apply under such a schedule; the pipeline opens a queue around the first half and runs what
is in it for the second. Norms, biases and embeddings are cheap and take part in the first. Without an open queue
nothing is put off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.models.layers.heads import Head, added_to_scores

Later = Callable[[], None]

_open: list[list[Later]] = []  # of the whole process, since autograd may run backward in threads of its own


@contextmanager
def put_off(queue: list[Later]) -> Iterator[None]:
    _open.append(queue)
    try:
        yield
    finally:
        _open.pop()


def weight_gradient(weight: Tensor, product: Callable[[], Tensor]) -> Tensor | None:
    """The gradient of a weight; None where a queue is open, and then the same gradient later through the same hooks."""
    if not _open:
        return product()
    with torch.enable_grad():
        alias = weight.view_as(weight)  # a backward through it ends in the weight's own accumulation
    _open[-1].append(lambda: torch.autograd.backward(alias, product()))
    return None


class DeferringLinear(nn.Module):
    """The same linear, or head, around the same weights."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.num_true = plain.vocab_size if isinstance(plain, Head) else plain.out_features

    def forward(self, x: Tensor) -> Tensor:
        bias = added_to_scores(self.weight, self.bias, self.num_true)
        y: Tensor = _Linear.apply(x, self.weight, bias)  # type: ignore[no-untyped-call]
        return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = weight_gradient(weight, lambda: rows.t() @ x.flatten(0, -2))
        return grad @ weight, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def apply_deferral(model: nn.Module) -> str:
    """Plain linears, in place; the tensor-parallel ones ask `weight_gradient` themselves. Says so for the log."""
    linears = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    for path, module in linears:
        model.set_submodule(path, DeferringLinear(module))
    return f"backward in halves: {len(linears)} linears besides those cut over tp"
