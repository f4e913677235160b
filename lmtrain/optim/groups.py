"""Which parameters decay, and the learning rate they all follow. Called by train; knows no optimizer in particular."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Groups = list[dict[str, Any]]  # torch's parameter groups


def build_groups(parameters: Mapping[str, Tensor], weight_decay: float) -> Groups:
    """Matrices and embeddings decay, as in GPT-2; biases and norms, which have one dim, do not."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def apply_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set once a step. A group may scale it by `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
