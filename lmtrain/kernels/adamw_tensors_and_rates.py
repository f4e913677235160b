"""The inputs of the AdamW kernel: which tensors an update changes, and by which rates. Built by optim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

from torch import Tensor

VECTOR_BYTES = 16  # bytes per load of a thread, if addresses and sizes are multiples of it


@dataclass(frozen=True)
class Rates:
    """The rates of a parameter group in a step. `count` is the number of updates so far, including this one."""

    lr: float
    betas: tuple[float, ...]
    eps: float
    weight_decay: float
    count: int

    @property
    def decay_factor(self) -> float:
        """The factor by which weight decay multiplies a weight."""
        return 1.0 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """The learning rate divided by the first average's bias correction."""
        return self.lr / (1.0 - self.betas[0] ** self.count)

    @property
    def root_correction(self) -> float:
        """The square root of the second average's bias correction."""
        return float((1.0 - self.betas[1] ** self.count) ** 0.5)


@dataclass(frozen=True)
class AdamWTensors:
    """The tensors of one weight's update: contiguous, of equal shape, and fp32 except for `compute_copy`."""

    weight: Tensor
    gradient: Tensor
    first_average: Tensor  # running average of gradients
    second_average: Tensor  # running average of squared gradients
    compute_copy: Tensor | None  # the half-precision copy used for compute, also updated; None if there is none

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.gradient, self.first_average, self.second_average, self.compute_copy

    @property
    def addresses(self) -> list[int]:
        """The device addresses of `tensors` in order; 0 for a missing `compute_copy`."""
        return [0 if x is None else x.data_ptr() for x in self.tensors]

    @property
    def alignment(self) -> int:
        """VECTOR_BYTES if it divides all addresses and the size, so that a kernel may use vector loads; otherwise 1."""
        return VECTOR_BYTES if reduce(or_, self.addresses, self.weight.numel()) % VECTOR_BYTES == 0 else 1
