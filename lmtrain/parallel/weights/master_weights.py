"""The compute weights of a model, the fp32 master weights of the optimizer, and the fp16 loss scale.

In fp32, and without training, compute and master weights are the same tensors. In half precision each gradient is added
to its fp32 master's gradient as soon as autograd has computed it, and freed: accumulation is in fp32, and a full set of
half-precision gradients never exists. Products with a total add to the master's gradient directly
(linear_forward_backward_products).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.parallel.device_and_precision_settings import Fp16Settings, PrecisionSettings
from lmtrain.parallel.linear_forward_backward_products import SummingModule, reset_gradient_totals
from lmtrain.schedules.table import Action, Kind

GradientCallback = Callable[[str, Tensor], None]  # (name of a weight, gradient)
WORK_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MasterWeights:
    """The unsharded fp32 weights by name, in the model's order; `publish` copies new values to the model."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], dtype: torch.dtype, summing_modules: Iterable[SummingModule] = ()
    ) -> None:
        """Create fp32 masters and convert the parameters to `dtype`; if all have `dtype`, they are their own masters.

        `summing_modules` lists the modules whose weight gradients, in half precision, are summed by products.
        """
        self.dtype, self.work = dtype, parameters
        self._callbacks: list[tuple[str, int, Kind, GradientCallback]] = []
        self.summing_modules: list[tuple[nn.Parameter, SummingModule]] = []
        if all(parameter.dtype is dtype for parameter in parameters.values()):
            self.master = self.work
            return
        self.master = {name: nn.Parameter(p.detach().clone()) for name, p in self.work.items()}
        to_work_dtype(self.work.values(), dtype)
        for name, parameter in self.work.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _make_gradient_hook(self.master[name])
                )
        names = {parameter: name for name, parameter in self.work.items()}
        self.summing_modules = [(self.master[names[module.weight]], module) for module in summing_modules]

    @property
    def compute_copies(self) -> dict[Tensor, Tensor]:
        """Master -> compute weight; empty if they are the same tensors."""
        return {} if self.master is self.work else {self.master[name]: work for name, work in self.work.items()}

    @torch.no_grad()
    def publish(self, *, already_written: bool = False) -> None:
        """Round the masters into the compute weights after an update or a load, unless the update has done so."""
        if self.master is not self.work and not already_written:
            torch._foreach_copy_(list(self.work.values()), list(self.master.values()))

    def clear_gradients(self, num_microbatches: int) -> None:
        """Clear the weights' gradients before a step of `num_microbatches` micro-batches; with several, zero also the
        fp32 sums to which products add gradients.
        """
        for parameter in self.master.values():
            parameter.grad = None
        reset_gradient_totals((module for _, module in self.summing_modules), num_microbatches)
        for master, module in self.summing_modules:
            master.grad = module.gradient_total

    def before_action(self, action: Action, is_last_microbatch: bool) -> None:
        """Do nothing: without data parallelism no gradient is reduced."""

    def on_complete_gradient(self, name: str, stage: int, half: Kind, callback: GradientCallback) -> None:
        """Register `callback(name, gradient)` for the weight `name` of pipeline stage `stage`, called in each step as
        soon as the weight's gradient is complete. In a split backward, `half` is the half (input or weight) that
        computes this gradient.
        """
        self._callbacks.append((name, stage, half, callback))

    def after_action(self, action: Action, is_last_microbatch: bool) -> None:
        """Call the registered callbacks of the weights whose gradient is complete now that `action` has run: a backward
        of their stage, for the step's last micro-batch.
        """
        for name, stage, half, callback in self._callbacks:
            if is_last_microbatch and action.stage == stage and action.kind in (Kind.BACKWARD, half):
                gradient = self.master[name].grad
                assert gradient is not None
                callback(name, gradient)

    def collect_gradients(self) -> None:
        """Finish after the last backward. Master gradients are already complete."""


def to_work_dtype(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Convert the parameters in place to `dtype`, that of compute weights."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def _make_gradient_hook(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Return an autograd hook for a half-precision weight: it adds the weight's gradient to the gradient of the fp32
    weight `master`, in fp32, and frees it.
    """
    def hook(work: Tensor) -> None:
        if work.grad is None:  # deferred by a schedule with a split backward
            return
        if master.grad is None:
            master.grad = work.grad.float()
        else:
            master.grad.add_(work.grad)
        work.grad = None

    return hook


class LossScale:
    """The factor of the loss that keeps small fp16 gradients above zero; 1 unless fp16.

    An overflow halves the scale and skips the step; a period without overflow doubles it.
    """

    def __init__(self, precision: PrecisionSettings) -> None:
        self.settings = precision if isinstance(precision, Fp16Settings) else None
        self.value = self.settings.initial_scale if self.settings else 1.0
        self.good_steps = 0

    @property
    def dynamic(self) -> bool:
        """True in fp16, where the scale adapts."""
        return self.settings is not None

    def update(self, overflow: bool) -> None:
        """Adapt the fp16 loss scale after a step: halve it if the step's gradients were not finite (`overflow`), double
        it after `growth_interval_steps` steps without overflow. Do nothing in other precisions.
        """
        if self.settings is None:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(self.value / 2, self.settings.min_scale)
        elif self.good_steps >= self.settings.growth_interval_steps:
            self.value *= 2
            self.good_steps = 0

    def state(self) -> dict[str, float]:
        """Return the entries that a checkpoint stores."""
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the scale from a checkpoint's entries, if it has them and this run is in fp16."""
        if self.settings is not None and "loss_scale" in state:
            self.value, self.good_steps = float(state["loss_scale"]), int(state["good_steps"])
