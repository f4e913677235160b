"""Set-up of a run, in the order in which it can fail: folder, model, optimizer, checkpoint, data.

Called by the command line with checked settings, on every process of the run. All processes compute and save; only rank
0 shows messages and owns the run's folder. The second step of the staircase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from lmtrain.checkpoint.reader import CheckpointReader
from lmtrain.checkpoint.save.writer import CheckpointWriter
from lmtrain.checkpoint.store import sweep
from lmtrain.data.loader import Loader
from lmtrain.observe.measure.memory import Memory
from lmtrain.observe.measure.throughput import Throughput, peak_flops
from lmtrain.optim.groups import build_groups
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.parallel.apply import build_parallel
from lmtrain.parallel.mesh import Mesh, main_thread_peers, saver_thread_peers
from lmtrain.parallel.model import ParallelModel
from lmtrain.runfolder.ends import read_last_stop, remove_stop
from lmtrain.runfolder.names import CHECKPOINTS
from lmtrain.runtime.files.files import folder_lock
from lmtrain.runtime.machine.device import device_name, set_deterministic, set_tf32, set_threads
from lmtrain.runtime.processes.agreement import Peers, collective_phase
from lmtrain.train.before.preflight import Inputs, changed_settings
from lmtrain.train.before.resume_checks import passed_over
from lmtrain.train.config import RunConfig
from lmtrain.train.costs import Costs
from lmtrain.train.record.records import open_records, open_view, show_beginning, worth_before
from lmtrain.train.state import Progress, Run, agreed_resume, go_on, pieces


@contextmanager
def open_run(
    config: RunConfig, inputs: Inputs, console: Console, mesh: Mesh, device: torch.device, hosts: Sequence[str] = ()
) -> Iterator[Run]:
    """Yield the Run, ready to train, and close everything afterwards.

    All ranks take part in collectives. `hosts` has the host of each rank, for the table that rank 0 shows.
    """
    with ExitStack() as stack:
        folder = Path(config.run.dir)
        leads, peers = mesh.rank == 0, main_thread_peers(mesh)
        before = read_last_stop(folder) if leads else {}
        inputs = replace(inputs, resume_from=enter_folder(stack, folder, config, peers))

        set_threads(config.compute.threads)
        set_deterministic(config.compute.deterministic)
        set_tf32(config.compute.tf32)
        model = build_parallel(
            inputs.model, config.precision, config.compute, device,
            seed=config.train.seed, training=True, mesh=mesh, parallel=config.parallel, recompute=config.recompute,
        )  # fmt: skip
        optimizer = build_optimizer(config.optim, model)
        progress = Progress()
        passed: list[str] = []
        if inputs.resume_from is not None:
            inputs, progress = go_on(config, inputs, model, optimizer, peers, passed)
        elif inputs.weights_from is not None:
            with collective_phase(peers):
                model.load(CheckpointReader(inputs.weights_from).load_into)

        loader = Loader(
            inputs.data.train, inputs.data.order, config.batch_plan, config.train.micro_batch,
            mesh.dp.index, mesh.dp.size, prefetch_steps=config.data.prefetch_steps, pin=device.type == "cuda",
        )  # fmt: skip
        stack.callback(loader.close)
        writer = stack.enter_context(CheckpointWriter(
            folder / CHECKPOINTS, keep_last=config.checkpoint.keep_last, asynchronous=config.checkpoint.asynchronous,
            keep_every_steps=config.checkpoint.keep_every_steps, keep_best=config.checkpoint.keep_best,
            peers=saver_thread_peers(mesh), verify_after_save=config.checkpoint.verify_after_save,
        ))  # fmt: skip
        if config.checkpoint.saves_on_the_way:  # because: a save at the end can allocate buffers then
            writer.reserve(model.owned(pieces(model, optimizer)))

        changed = changed_settings(config, inputs) if leads else {}
        with collective_phase(peers):
            metrics, sinks, log = open_records(stack, folder, config, inputs, progress, leads=leads)
            writer.worth = worth_before(folder, config, progress.step) if leads else {}
        view = open_view(stack, console, config, inputs, model, device_name(device), progress.step, log)
        if config.checkpoint.fallback and inputs.resume_from is not None:
            passed += passed_over(inputs.resume_from)
        show_beginning(view, config, inputs, mesh, hosts, passed)
        yield Run(
            config, inputs, folder, mesh, model, optimizer, progress, loader, writer, metrics, sinks, view,
            build_throughput(config, inputs, mesh, device), Costs(sum(p.numel() for p in model.parameters.values())),
            Memory(str(device), mesh.rank), before, changed, passed_over=tuple(passed),
        )  # fmt: skip


def enter_folder(stack: ExitStack, folder: Path, config: RunConfig, peers: Peers) -> Path | None:
    """Lock and clean the run's folder on rank 0, and return the checkpoint to resume from, or None.

    All ranks take part; a failure on rank 0 is raised on every rank.
    """
    with collective_phase(peers):
        if peers.rank == 0:
            stack.enter_context(folder_lock(folder))
            sweep(folder / CHECKPOINTS)
            remove_stop(folder)
    return agreed_resume(folder, config, peers)  # because: the sweep can restore a checkpoint


def build_throughput(config: RunConfig, inputs: Inputs, mesh: Mesh, device: torch.device) -> Throughput:
    peak, kind = config.observe.peak_tflops, "tf32" if config.compute.tf32 else config.precision.kind
    peak_each = peak * 1e12 if peak else peak_flops(device_name(device), kind)
    return Throughput(
        flops_per_token=config.flops_per_token(inputs.model),
        peak=peak_each * mesh.world.size if peak_each else None,
    )


def build_optimizer(settings: OptimSettings, model: ParallelModel) -> torch.optim.Optimizer:
    """Build the optimizer and attach the model to it.

    By convention `kind: lamb` is lmtrain/optim/lamb.py with a `build` function, so that a new optimizer changes nothing
    here.
    """
    groups = build_groups(model.parameters, settings.weight_decay)
    optimizer: torch.optim.Optimizer = settings.component().build(settings, groups, model.whole_tensors)
    model.attach(optimizer)
    return optimizer
