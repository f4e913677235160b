"""What a worker process sees of a run of several: its parts of the weights, its products and its talk, in order.

Called on each rank through the pool of tests/layouts.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.parallel.mesh import build_mesh, main_thread_peers
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.process_group import EXTRA_TIMEOUT_S
from lmtrain.runtime.processes.stop_signals import StopRequest
from lmtrain.train.loop import train
from lmtrain.train.run_config import RunConfig
from lmtrain.train.set_up_run import open_run
from lmtrain.train.startup_checks.preflight import preflight

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
_CPU = torch.device("cpu")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """[operator, bytes of its largest tensor] of each product and each message or collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if function.namespace == "c10d" or name in _PRODUCTS:
            leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            self.seen.append((name, max((leaf.nbytes for leaf in leaves), default=0)))
        return function(*args, **(kwargs or {}))


def trained(tree: dict[str, Any], place: str) -> dict[str, Any]:
    os.chdir(place)
    config = build_settings(RunConfig, tree)
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    launcher = "torchrun" if size > 1 else "single"
    env = ProcessEnv(rank, size, rank, launcher, "here", local_world_size=size)
    inputs = preflight(config, env)
    mesh = build_mesh(config.parallel.layout, _CPU, config.parallel.timeout_s)
    hosts = [env.host] * size
    with open_run(config, inputs, Console(quiet=True), mesh, _CPU, hosts) as run:
        with Watch() as watch:
            train(run, StopRequest())
        return {"parts": {name: list(p.shape) for name, p in run.model.parameters.items()}, "order": watch.seen}


def met(tree: dict[str, Any]) -> bool:
    """Whether the first process was still there when the second came, who takes three seconds more than are added."""
    config = build_settings(RunConfig, tree)
    try:
        peers = main_thread_peers(build_mesh(config.parallel.layout, _CPU, config.parallel.timeout_s))
        time.sleep((3.0 + EXTRA_TIMEOUT_S) * peers.rank)
        peers.gather([peers.rank])
    except RuntimeError:
        return False
    return True
