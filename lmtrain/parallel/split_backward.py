"""Backward in halves, for zero-bubble schedules: a product's weight gradient is put off until there is time.

Called by products; the pipeline opens a queue around the first half and runs what is in it for the second. Norms,
biases and embeddings are cheap and take part in the first. Without an open queue nothing is put off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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


def later(work: Later) -> None:
    """In the second half of a backward; now, where no queue is open."""
    if _open:
        _open[-1].append(work)
    else:
        work()
