"""What a run needs of the machine that it would start on: a device, a compiler, its folder, room on the disk, a port.

Called by preflight, before torch is imported, for a run and for a dry run alike. It makes nothing and keeps nothing.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lmtrain.checkpoint.save.planned import check_listed
from lmtrain.checkpoint.store import CHECKPOINTS, list_checkpoints
from lmtrain.errors import CheckpointError, LayoutError, StorageError
from lmtrain.models.model_settings import ModelSettings, true_weights
from lmtrain.runtime.files import check_output_folder, free_bytes
from lmtrain.runtime.gpus import Gpus, device_problem
from lmtrain.runtime.ports import listen
from lmtrain.runtime.process import ProcessEnv, Rendezvous
from lmtrain.train.config import RunConfig
from lmtrain.units import format_bytes

_FP32_BYTES = 4
_COPIES = 2  # because: a checkpoint is whole before the one before it goes


def compiler_problems(config: RunConfig) -> Iterator[str]:
    if config.compute.compile and not any(shutil.which(cc) for cc in ("c++", "g++", "clang++")):
        yield (
            "compute.compile=true needs a C++ compiler and none of c++, g++ and clang++ is here. "
            "Install one or set compute.compile=false."
        )


def check_device(config: RunConfig, env: ProcessEnv) -> None:
    if config.compute.device == "cpu":
        return
    if problem := device_problem(config.compute.device, Gpus.found(), env):
        raise problem


def check_folder(config: RunConfig, model: ModelSettings, *, lock: bool) -> None:
    """Where the run keeps what it makes: whether it can, and whether there is room for its checkpoints."""
    folder = Path(config.run.dir)
    check_output_folder(folder, f"run.dir={config.run.dir}", lock=lock)
    if config.checkpoint.interval_steps is None:
        return
    there = len(list_checkpoints(folder / CHECKPOINTS))
    is_only_one = config.checkpoint.interval_steps == 0 or config.checkpoint.interval_steps >= config.total_steps
    copies = 1 if is_only_one else max(1, _COPIES - there)
    need, free = copies * checkpoint_bytes(config, model), free_bytes(folder)
    if need > free:
        them = "A checkpoint needs" if copies == 1 else f"{copies} checkpoints need"
        raise StorageError(
            f"{them} {format_bytes(need)} in run.dir={config.run.dir} and its disk has {format_bytes(free)} free. "
            "Free some space, choose another run.dir, or set checkpoint.interval_steps=null to save none."
        )


def checkpoint_bytes(config: RunConfig, model: ModelSettings) -> int:
    """Weights and what the optimizer remembers of each; the rest of a checkpoint is small."""
    weights = true_weights(model).items()
    return sum(_FP32_BYTES * math.prod(shape) * (1 + config.optim.num_slots(name, shape)) for name, shape in weights)


def check_pieces(config: RunConfig, model: ModelSettings) -> None:
    """Whether a checkpoint of this layout could be written: better told now than at the first save."""
    if config.checkpoint.interval_steps is None:
        return
    try:
        check_listed(model, config.parallel.layout, config.optim.num_slots, checkpoint_bytes(config, model))
    except CheckpointError as error:
        raise LayoutError(f"{error} checkpoint.interval_steps=null saves none.") from error


def check_port(env: ProcessEnv) -> None:
    """Where the processes would meet; the port is free again when this returns."""
    if env.world_size == 1:
        return
    host, port = "127.0.0.1", 0  # our own launcher takes any
    if env.launcher != "lmtrain":
        at = Rendezvous.detect(env)
        if env.rank > 0 or at.held_by_launcher or at.listen_fd is not None:
            return
        host, port = host if at.stays_on_node else "", at.port
    os.close(listen(host, port))
