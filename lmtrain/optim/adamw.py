"""AdamW: a single fused pass where kernels can run, otherwise torch's own, fused if the device supports it.

Found by train through the settings' kind.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lmtrain.kernels import adamw as kernel
from lmtrain.kernels.moved import Moved, Rates
from lmtrain.kernels.on_gpu import fuses
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.optim.groups import Groups
from lmtrain.optim.moments import SLOTS, UncompiledAdamW, UncompiledOptimizer, count_update, with_gradients
from lmtrain.optim.state import apply_empty_state
from lmtrain.optim.whole import Alone, Whole

_FUSED = {"cpu", "cuda"}


def build(settings: AdamWSettings, groups: Groups, whole: Whole = Alone()) -> torch.optim.Optimizer:
    """Build AdamW. `whole` is unused, because AdamW is elementwise and works on shards alone."""
    devices = {parameter.device for group in groups for parameter in group["params"]}
    if devices and all(map(fuses, devices)):
        return OnePassAdamW(settings, groups)
    first, second = settings.betas
    return UncompiledAdamW(
        [{**group, "slots": SLOTS} for group in groups],
        lr=settings.lr,
        betas=(first, second),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused={device.type for device in devices} <= _FUSED,
    )


class OnePassAdamW(UncompiledOptimizer):
    """AdamW in a single fused pass, including clipping and the half-precision copies.

    Gradients are scaled by `factor`, which clips them; `rounded` maps each fp32 master weight to its half-precision
    copy. Both are set by parallel.
    """

    def __init__(self, settings: AdamWSettings, groups: Groups) -> None:
        super().__init__([{**group, "slots": SLOTS} for group in groups], {"lr": settings.lr})
        self.settings = settings
        self.factor: Tensor | None = None
        self.rounded: Mapping[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        apply_empty_state(self)
        for group in self.param_groups:
            _, parameters = with_gradients(group)
            if parameters:
                count, settings = count_update(self, parameters), self.settings
                rates = Rates(group["lr"], settings.betas, settings.eps, group["weight_decay"], count)
                kernel.step([self._moved(parameter) for parameter in parameters], rates, self.factor)

    def _moved(self, parameter: Tensor) -> Moved:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        first, second = (state[slot] for slot in SLOTS)
        return Moved(parameter, gradient.contiguous(), first, second, self.rounded.get(parameter))
