"""The weights a model computes with, the fp32 weights the optimizer owns, and the fp16 loss scale.

In fp32, and where nothing trains, they are the same tensors. In half precision each gradient is added to its fp32
master as soon as autograd has made it, and freed: accumulation is exact to fp32 and no full set of half-precision
gradients ever exists. Products that sum by themselves add to the master's gradient directly (products).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.parallel.compute_settings import Fp16Settings, PrecisionSettings
from lmtrain.parallel.products import Summing, clear_totals
from lmtrain.schedules.table import Action, Kind

Use = Callable[[str, Tensor], None]  # (name of a weight, its gradient)
WORK_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MasterWeights:
    """Name -> fp32 weight, in the model's order; `publish` hands new values to the model."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], dtype: torch.dtype, summing: Iterable[Summing] = ()
    ) -> None:
        """Make masters of weights that compute in `dtype`; weights of that dtype are the masters themselves.

        `summing`: modules whose half-precision weights have their gradients summed by products.
        """
        self.dtype, self.work = dtype, parameters
        self._watched: list[tuple[str, int, Kind, Use]] = []
        self.summing: list[tuple[nn.Parameter, Summing]] = []
        if all(parameter.dtype is dtype for parameter in parameters.values()):
            self.master = self.work
            return
        self.master = {name: nn.Parameter(p.detach().clone()) for name, p in self.work.items()}
        to_work_dtype(self.work.values(), dtype)
        for name, parameter in self.work.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _move_gradient(self.master[name])
                )
        names = {parameter: name for name, parameter in self.work.items()}
        self.summing = [(self.master[names[module.weight]], module) for module in summing]

    @property
    def rounded(self) -> dict[Tensor, Tensor]:
        """Master -> the weight that computes, if they are two tensors."""
        return {} if self.master is self.work else {self.master[name]: work for name, work in self.work.items()}

    @torch.no_grad()
    def publish(self, *, written: bool = False) -> None:
        """Round the masters into the weights that compute, after an update or a load, unless they are `written`."""
        if self.master is not self.work and not written:
            torch._foreach_copy_(list(self.work.values()), list(self.master.values()))

    def clear_gradients(self, num_microbatches: int) -> None:
        """Clear gradients before a step of `num_microbatches`."""
        for parameter in self.master.values():
            parameter.grad = None
        clear_totals((module for _, module in self.summing), num_microbatches)
        for master, module in self.summing:
            master.grad = module.total

    def begin(self, action: Action, last: bool) -> None:
        """Do nothing before a backward, since one replica has nothing to send."""

    def when_whole(self, name: str, stage: int, half: Kind, use: Use) -> None:
        """Call `use` on a gradient as soon as the last backward, or the half that adds to it, is done."""
        self._watched.append((name, stage, half, use))

    def done(self, action: Action, last: bool) -> None:
        """Use the watched gradients that are complete after an action."""
        for name, stage, half, use in self._watched:
            if last and action.stage == stage and action.kind in (Kind.BACKWARD, half):
                gradient = self.master[name].grad
                assert gradient is not None
                use(name, gradient)

    def collect(self) -> None:
        """Do nothing after the last backward, since gradients are in place as soon as they are made."""


def to_work_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def _move_gradient(master: nn.Parameter) -> Any:
    def hook(work: Tensor) -> None:
        if work.grad is None:  # put off by a schedule that takes backward apart
            return
        if master.grad is None:
            master.grad = work.grad.float()
        else:
            master.grad.add_(work.grad)
        work.grad = None

    return hook


class LossScale:
    """1 unless fp16. Multiplies the loss so that small gradients survive; overflow halves it and skips the step."""

    def __init__(self, precision: PrecisionSettings) -> None:
        self.settings = precision if isinstance(precision, Fp16Settings) else None
        self.value = self.settings.initial_scale if self.settings else 1.0
        self.good_steps = 0

    @property
    def dynamic(self) -> bool:
        return self.settings is not None

    def update(self, overflow: bool) -> None:
        if self.settings is None:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(self.value / 2, self.settings.min_scale)
        elif self.good_steps >= self.settings.growth_interval_steps:
            self.value *= 2
            self.good_steps = 0

    def state(self) -> dict[str, float]:
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        if self.settings is not None and "loss_scale" in state:
            self.value, self.good_steps = float(state["loss_scale"]), int(state["good_steps"])
