"""Checks of a run that need no data: the number of processes, the compiler, the device, packages, the port.

Called by preflight, and by commands that start or print a line of processes. Torch-free, and light: it is imported
before a wrong line is refused.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lmtrain.errors import LayoutError, SettingsError, leave_out, way
from lmtrain.layout import Layout, divisors
from lmtrain.runtime.machine.pip_install_hint import install_command
from lmtrain.runtime.machine.visible_gpus_without_torch import Gpus, device_problem
from lmtrain.runtime.processes.process_environment import DRY_RUN_LAUNCHER, ProcessEnv, Rendezvous, listen
from lmtrain.train.run_config import RunConfig
from lmtrain.train.train_settings import TrainSettings


def check_machine(config: RunConfig, env: ProcessEnv, *, starts_run: bool = True) -> bool:
    """Check all that needs no data: the number of processes, a C++ compiler for compute.compile, the device, and
    packages that the settings need; raise LayoutError or SettingsError. Return True if these are the run's processes.
    Return False if a single process checks a run of many, as it may if `starts_run` is False (a dry run); device and
    packages are then not checked.
    """
    problems, counts = list(compiler_problems(config)), starts_run or env.launcher != "single"
    parallel = config.parallel
    if wrong := list(process_problems(parallel.layout, env, config.train, zero=parallel.zero)) if counts else []:
        raise LayoutError(*wrong, *problems)
    if problems:
        raise SettingsError(problems)
    is_here = env.world_size == parallel.layout.world_size and env.launcher != DRY_RUN_LAUNCHER
    if is_here:
        check_device(config, env)
    if is_here and env.rank == 0:
        check_sinks(config)
    return is_here


def process_problems(
    layout: Layout, env: ProcessEnv, train: TrainSettings | None = None, *, zero: int = 0
) -> Iterator[str]:
    """Yield an error message if the number of started processes, `env.world_size`, differs from the number that the
    layout needs. With `train`, the message also names the batch settings, and with `zero` the ZeRO level, that would
    have to change with the layout.
    """
    if env.world_size != layout.world_size:
        sizes = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp")}
        factors = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
        required = " x ".join(factors) if len(factors) > 1 else f"parallel.{(factors or ['*'])[0]}"
        processes = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
        with_option = f" with {way('--nproc', str(layout.world_size))}" if env.takes_nproc else ""
        start = f"start {processes}{with_option}"
        ways = [start]
        axis = "dp_replicate" if layout.dp_replicate > 1 and layout.dp_shard == 1 else "dp_shard"
        fitting, rest = divmod(env.world_size * sizes[axis], layout.world_size)
        new_batch = [*_batch_overrides(replace(layout, **{axis: fitting}), train)] if rest == 0 else []
        if rest == 0 and not (new_batch and train and train.rampup):  # because: a ramp-up would have to change with it
            less_zero = ["parallel.zero=1"] * (zero > 1 and axis == "dp_shard" and fitting == 1)
            share = f"set {way(f'parallel.{axis}={fitting}', *less_zero, *new_batch)}"
            # because: who has started more processes than the layout needs means to use them
            ways = [share, start] if env.world_size > layout.world_size else [start, share]
        ways += [f"add {way('--elastic')}, which takes the nearest layout for them"] if train else []
        started = "1 process was" if env.world_size == 1 else f"{env.world_size} processes were"
        yield f"{started} started but {required} needs {layout.world_size}. {_sentence(ways)}"


def _sentence(ways: Sequence[str]) -> str:
    """Return alternatives as one sentence: "Start 2 processes, or add --elastic."."""
    text = ", or ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def _batch_overrides(layout: Layout, train: TrainSettings | None) -> Iterator[str]:
    """Yield overrides such as `train.micro_batch=2` that make the batch sizes divisible by this layout's number of
    data-parallel replicas; nothing if they are, or if `train` is None.
    """
    if train is None:
        return
    share = -(-train.global_batch // layout.dp)
    if share * layout.dp != train.global_batch:
        yield f"train.global_batch={share * layout.dp}"
    if share % train.micro_batch:
        yield f"train.micro_batch={divisors(share, train.micro_batch)[-1]}"


def layout_warnings(layout: Layout, env: ProcessEnv) -> Iterator[str]:
    """Yield a warning if a tensor-parallel group would span several nodes, where its all-reduces are slow."""
    if env.local_world_size and env.local_world_size % layout.tp:
        inside = divisors(env.local_world_size, layout.tp)[-1]
        yield (
            f"parallel.tp={layout.tp} goes across nodes, as {env.host} has {env.local_world_size} processes: each "
            "layer waits for sums over the links between them. If these are slower than those inside a node, "
            f"parallel.tp={inside} is faster."
        )


def compiler_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message if compute.compile needs a C++ compiler that is not installed."""
    if config.compute.compile is True and not any(shutil.which(cc) for cc in ("c++", "g++", "clang++")):
        yield (
            "compute.compile=true needs a C++ compiler and none of c++, g++ and clang++ is installed. "
            f"Install one, or set {way('compute.compile=auto')}."
        )


def check_device(config: RunConfig, env: ProcessEnv) -> None:
    """Raise an LmtrainError if the device that compute.device names is missing or unusable, or if compute.tf32 is set
    and there is no GPU. Do nothing for compute.device=cpu.
    """
    if config.compute.device == "cpu":
        return
    gpus = Gpus.detect()
    if problem := device_problem(config.compute.device, gpus, env):
        raise problem
    if config.compute.tf32 and gpus.count == 0:
        way_out = f"{leave_out()}, or use a machine with one."
        raise SettingsError([f"compute.tf32=true needs a GPU, and this machine has none. {way_out}"])


def check_sinks(config: RunConfig) -> None:
    """Raise SettingsError if observe.wandb is on and the Python package wandb is not installed."""
    if config.observe.wandb == "none":
        return
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # because: a mere folder named wandb is not the package
        raise SettingsError([
            f"observe.wandb={config.observe.wandb} needs the package wandb, which is not installed. "
            f"Run `{install_command('wandb')}`."
        ])  # fmt: skip


def check_port(env: ProcessEnv) -> None:
    """Raise an error if this process cannot open the TCP port at which the ranks of the run will find each other. The
    port is closed again. Do nothing for a single process, or if the launcher or another rank will open the port.
    """
    if env.world_size == 1:
        return
    host, port = "127.0.0.1", 0  # because: our own launcher takes any free port
    if env.launcher != "lmtrain":
        rendezvous = Rendezvous.detect(env)
        if env.rank > 0 or rendezvous.held_by_launcher or rendezvous.listen_fd is not None:
            return
        host, port = host if rendezvous.stays_on_node else "", rendezvous.port
    os.close(listen(host, port))
