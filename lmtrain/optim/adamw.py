"""AdamW: a single fused pass where kernels can run, otherwise torch's own, fused if the device supports it.

Train imports this module by the settings' `kind` and calls `build`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lmtrain.kernels import adamw as kernel
from lmtrain.kernels.adamw_tensors_and_rates import AdamWTensors, Rates
from lmtrain.kernels.triton_availability import uses_fused_kernels
from lmtrain.optim.adam_update_direction import (
    SLOTS,
    UncompiledAdamW,
    UncompiledOptimizer,
    groups_with_gradients,
    increment_update_count,
)
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.optim.interface_to_whole_weights import LocalTensors, WholeTensors
from lmtrain.optim.parameter_groups import Groups

_TORCH_FUSED_DEVICES = {"cpu", "cuda"}


def build(settings: AdamWSettings, groups: Groups, whole: WholeTensors = LocalTensors()) -> torch.optim.Optimizer:
    """Build AdamW for these torch parameter groups: with lmtrain's fused kernel if all parameters are on devices that
    can run it, otherwise torch's. `whole` is unused, because AdamW is elementwise and needs only local shards.
    """
    devices = {parameter.device for group in groups for parameter in group["params"]}
    if devices and all(map(uses_fused_kernels, devices)):
        return OnePassAdamW(settings, groups)
    first, second = settings.betas
    return UncompiledAdamW(
        [{**group, "slots": SLOTS} for group in groups],
        lr=settings.lr,
        betas=(first, second),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused={device.type for device in devices} <= _TORCH_FUSED_DEVICES,
    )


class OnePassAdamW(UncompiledOptimizer):
    """AdamW in a single fused pass, including clipping and the half-precision copies.

    Parallel sets `gradient_factor`, a multiplier that clips gradients, and `compute_copies`, which maps each fp32
    master weight to its half-precision copy.
    """

    def __init__(self, settings: AdamWSettings, groups: Groups) -> None:
        super().__init__([{**group, "slots": SLOTS} for group in groups], {"lr": settings.lr})
        self.settings = settings
        self.gradient_factor: Tensor | None = None
        self.compute_copies: Mapping[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group, _, parameters in groups_with_gradients(self):
            count, settings = increment_update_count(self, parameters), self.settings
            rates = Rates(group["lr"], settings.betas, settings.eps, group["weight_decay"], count)
            kernel.step([self._tensors_of(parameter) for parameter in parameters], rates, self.gradient_factor)

    def _tensors_of(self, parameter: Tensor) -> AdamWTensors:
        """Return the tensors that the kernel needs to update a parameter: the parameter itself, its gradient, its two
        running averages and its half-precision copy, if there is one.
        """
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        first, second = (state[slot] for slot in SLOTS)
        return AdamWTensors(parameter, gradient.contiguous(), first, second, self.compute_copies.get(parameter))
