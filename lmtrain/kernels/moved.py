"""The inputs of the AdamW kernel: which tensors an update changes, and by which rates. Built by optim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

from torch import Tensor

WIDEST = 16  # bytes per load of a thread, if addresses and sizes are multiples of it


@dataclass(frozen=True)
class Rates:
    """The rates of a parameter group in a step. `count` is the number of updates, including this one."""

    lr: float
    betas: tuple[float, ...]
    eps: float
    weight_decay: float
    count: int

    @property
    def kept(self) -> float:
        """The factor of weight decay that multiplies a weight."""
        return 1.0 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """The learning rate divided by the first average's bias correction."""
        return self.lr / (1.0 - self.betas[0] ** self.count)

    @property
    def root(self) -> float:
        """The square root of the second average's bias correction."""
        return float((1.0 - self.betas[1] ** self.count) ** 0.5)


@dataclass(frozen=True)
class Moved:
    """A weight with its gradient and averages: contiguous, of equal shape, and fp32 except for `rounded`."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    rounded: Tensor | None  # the half-precision copy used for compute, also updated; None if there is none

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.gradient, self.first, self.second, self.rounded

    @property
    def addresses(self) -> list[int]:
        """The device addresses of `tensors` in order; 0 for a missing `rounded`."""
        return [0 if x is None else x.data_ptr() for x in self.tensors]

    @property
    def divisor(self) -> int:
        """WIDEST if it divides all addresses and the size, so that a kernel may use vector loads; otherwise 1."""
        return WIDEST if reduce(or_, self.addresses, self.weight.numel()) % WIDEST == 0 else 1
