"""Gradient descent whose step is a running sum of gradients (Polyak 1964)."""

from __future__ import annotations

import torch

from lmtrain.optim.interface_to_whole_weights import LocalTensors, WholeTensors
from lmtrain.optim.optimizer_state import apply_empty_state
from lmtrain.optim.parameter_groups import Groups
from tests.plugin_example.heavy_ball_settings import HeavyBallSettings


def build(settings: HeavyBallSettings, groups: Groups, whole: WholeTensors = LocalTensors()) -> HeavyBall:
    return HeavyBall(settings, groups)


class HeavyBall(torch.optim.Optimizer):
    def __init__(self, settings: HeavyBallSettings, groups: Groups) -> None:
        super().__init__([{**group, "slots": ("momentum",)} for group in groups], {"lr": settings.lr})
        self.keep = settings.momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        apply_empty_state(self)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] += 1
                    state["momentum"].mul_(self.keep).add_(parameter.grad)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(state["momentum"], alpha=group["lr"])
