"""What workers measure for test_sharded_bytes.py: bytes by kind and collectives of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmtrain.parallel.mesh import Mesh
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.layouts.cases import Case
from tests.layouts.memory import Between, living_tensors, storages, weight_bytes
from tests.layouts.toy_data import loader_of
from tests.layouts.training import OPTIM, build, dp_index


def weights(name: str) -> dict[str, int]:
    """Bytes by kind between two microbatches of the second step, when every kind is there."""
    case = Case.named(name)
    before = set(storages(living_tensors()))
    model = build(case)
    optimizer = build_optimizer(OPTIM, model)
    loader = loader_of(case, dp_index(case))
    train_step(model, optimizer, loader.read(0), OPTIM.lr, OPTIM.clip_norm)
    found: dict[str, int] = {}
    step = loader.read(1)
    microbatches = Between(step.microbatches, lambda: found.update(weight_bytes(model, optimizer, before)))
    train_step(model, optimizer, replace(step, microbatches=microbatches), OPTIM.lr, OPTIM.clip_norm)
    return found


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """[operator, axis, bytes of the whole] of each collective, whoever calls it."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        axes = ("tp", "dp_shard", "dp_replicate", "dp", "world")
        self.axes = {getattr(mesh, a).group.group_name: a for a in reversed(axes) if getattr(mesh, a).group}
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            name = dist.ProcessGroup.unbox(group).group_name
            whole = max(t.nbytes for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor))
            self.seen.append((function._schema.name.removeprefix("c10d::"), self.axes.get(name, name), whole))
        return function(*args, **(kwargs or {}))


def collectives(name: str) -> list[tuple[str, str, int]]:
    """Those of the second step: forward and backward of every microbatch, norm, update."""
    case = Case.named(name)
    model = build(case)
    optimizer = build_optimizer(OPTIM, model)
    loader = loader_of(case, dp_index(case))
    train_step(model, optimizer, loader.read(0), OPTIM.lr, OPTIM.clip_norm)
    counter = Collectives(model.mesh)
    with counter:
        train_step(model, optimizer, loader.read(1), OPTIM.lr, OPTIM.clip_norm)
    return counter.seen
