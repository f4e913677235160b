"""What a run needs of the machine that it would start on: a device, a compiler, its folder, room on the disk, a port.

Called by preflight, before torch is imported, for a run and for a dry run alike. It makes nothing and keeps nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lmtrain.checkpoint.store import list_checkpoints
from lmtrain.errors import CheckpointError, LayoutError, SettingsError, StorageError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.plan.run_model.checkpoint_size import check_listed, checkpoint_bytes
from lmtrain.runfolder.names import CHECKPOINTS
from lmtrain.runtime.files.files import check_output_folder, free_bytes
from lmtrain.runtime.machine.gpus import Gpus, device_problem
from lmtrain.runtime.processes.process import ProcessEnv, Rendezvous, listen
from lmtrain.train.config import RunConfig
from lmtrain.units import format_bytes

_COPIES = 2  # because: a checkpoint is whole before the one before it goes


def compiler_problems(config: RunConfig) -> Iterator[str]:
    if config.compute.compile is True and not any(shutil.which(cc) for cc in ("c++", "g++", "clang++")):
        yield (
            "compute.compile=true needs a C++ compiler and none of c++, g++ and clang++ is here. "
            "Install one or set compute.compile=false."
        )


def check_device(config: RunConfig, env: ProcessEnv) -> None:
    if config.compute.device == "cpu":
        return
    gpus = Gpus.found()
    if problem := device_problem(config.compute.device, gpus, env):
        raise problem
    if config.compute.tf32 and gpus.count == 0:
        raise SettingsError(["compute.tf32=true is of GPUs, and none is here. Use compute.tf32=false."])


def check_sinks(config: RunConfig) -> None:
    """Whether what a run is to write to besides its folder is there."""
    if config.observe.wandb == "none":
        return
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # because: a folder of that name, as the package leaves, is not it
        raise SettingsError([
            f"observe.wandb={config.observe.wandb} needs the package wandb, which is not installed. "
            "Run `pip install 'lmtrain[wandb]'`, or set observe.wandb=none."
        ])  # fmt: skip


def check_folder(config: RunConfig, model: ModelSettings, *, lock: bool) -> None:
    """Where the run keeps what it makes: whether it can, and whether there is room for its checkpoints."""
    folder = Path(config.run.dir)
    check_output_folder(folder, f"run.dir={config.run.dir}", lock=lock)
    if config.checkpoint.interval_steps is None:
        return
    there = len(list_checkpoints(folder / CHECKPOINTS))
    is_only_one = config.checkpoint.interval_steps == 0 or config.checkpoint.interval_steps >= config.total_steps
    copies = 1 if is_only_one else max(1, _COPIES - there)
    need, free = copies * checkpoint_bytes(model, config.optim.num_slots), free_bytes(folder)
    if need > free:
        them = "A checkpoint needs" if copies == 1 else f"{copies} checkpoints need"
        raise StorageError(
            f"{them} {format_bytes(need)} in run.dir={config.run.dir} and its disk has {format_bytes(free)} free. "
            "Free some space, choose another run.dir, or set checkpoint.interval_steps=null to save none."
        )


def check_pieces(config: RunConfig, model: ModelSettings) -> None:
    """Whether a checkpoint of this layout could be written: better told now than at the first save."""
    if config.checkpoint.interval_steps is None:
        return
    try:
        slots = config.optim.num_slots
        check_listed(model, config.parallel.layout, slots, checkpoint_bytes(model, slots))
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
