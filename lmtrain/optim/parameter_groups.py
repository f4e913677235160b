"""Parameter groups by weight decay, and their learning rate. Called by train; independent of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Groups = list[dict[str, Any]]  # torch's parameter groups, plus "names" in the order of "params"


def build_groups(parameters: Mapping[str, Tensor], weight_decay: float) -> Groups:
    """Return up to two torch parameter groups: parameters with 2 dims or more, with weight decay `weight_decay`, and
    all others (biases and norms), with none, as in GPT-2. A group without parameters is left out.
    """
    matrices = {name: p for name, p in parameters.items() if p.ndim >= 2}
    vectors = {name: p for name, p in parameters.items() if p.ndim < 2}
    return [build_group(part, decay) for part, decay in ((matrices, weight_decay), (vectors, 0.0)) if part]


def build_group(parameters: Mapping[str, Tensor], weight_decay: float) -> dict[str, Any]:
    """Return a torch parameter group, with the parameters' names as an additional entry."""
    return {"params": list(parameters.values()), "names": list(parameters), "weight_decay": weight_decay}


def apply_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group, times the group's `lr_scale` if present. Called once per step."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
