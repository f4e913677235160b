"""What an update moves, and by how much: the words in which optim asks for one of adamw.py, and its kernel is told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

from torch import Tensor

WIDEST = 16  # bytes of one load of a thread, where addresses and sizes allow it


@dataclass(frozen=True)
class Rates:
    """Of one group of weights in one step. `count`: of updates, this one among them."""

    lr: float
    betas: tuple[float, ...]
    eps: float
    weight_decay: float
    count: int

    @property
    def kept(self) -> float:
        """The share of a weight that decay leaves."""
        return 1.0 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        return self.lr / (1.0 - self.betas[0] ** self.count)

    @property
    def root(self) -> float:
        """The correction of the second average's root for its start at 0."""
        return float((1.0 - self.betas[1] ** self.count) ** 0.5)


@dataclass(frozen=True)
class Moved:
    """A weight and what belongs to it: contiguous, of one shape, and fp32 but for `rounded`."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    rounded: Tensor | None  # the copy that computes, which is written too

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.gradient, self.first, self.second, self.rounded

    @property
    def addresses(self) -> list[int]:
        return [0 if x is None else x.data_ptr() for x in self.tensors]

    @property
    def divisor(self) -> int:
        """The number that divides all addresses and the size, by which a kernel may load and store at once."""
        return WIDEST if reduce(or_, self.addresses, self.weight.numel()) % WIDEST == 0 else 1
