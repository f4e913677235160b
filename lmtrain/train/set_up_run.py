"""Set-up of a run, in the order in which it can fail: folder, model, optimizer, checkpoint, data.

Called by the command line with checked settings, on every process of the run. All processes compute and save; only rank
0 shows messages and owns the run's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from lmtrain.checkpoint.find_and_prune import clear_leftovers
from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.data.loader import Loader
from lmtrain.observe.measure.process_and_gpu_memory import Memory
from lmtrain.observe.measure.throughput import Throughput, peak_flops
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.parameter_groups import build_groups
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.mesh import Mesh, main_thread_peers, saver_thread_peers
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.runfolder.file_names import CHECKPOINTS
from lmtrain.runfolder.read_and_record_run_end import read_last_stop, remove_stop
from lmtrain.runtime.files.atomic_files import folder_lock
from lmtrain.runtime.machine.choose_device import device_name, set_deterministic, set_tf32, set_threads
from lmtrain.runtime.processes.succeed_on_all_ranks_or_none import Peers, collective_phase
from lmtrain.train.exponential_weight_average import WeightAverage
from lmtrain.train.record.metrics_writer import open_records, open_view, scores_before_resume, show_start_notes
from lmtrain.train.run_config import RunConfig
from lmtrain.train.run_objects_and_resume import Progress, Run, agree_on_resume, held_pieces, load_first_weights, resume
from lmtrain.train.startup_checks.preflight import Inputs, changed_settings
from lmtrain.train.startup_checks.resume_checks import skipped_messages
from lmtrain.train.step_and_save_durations import Durations


@contextmanager
def open_run(
    config: RunConfig, inputs: Inputs, console: Console, mesh: Mesh, device: torch.device, hosts: Sequence[str] = ()
) -> Iterator[Run]:
    """Build everything that a run needs (model, optimizer, resumed state, data loader, checkpoint writer, records),
    yield it as a Run, and close it all afterwards.

    All ranks take part in collectives. `hosts` has the host name of each rank, for what rank 0 shows and records.
    """
    with ExitStack() as stack:
        folder = Path(config.run.dir)
        is_rank_0, peers = mesh.rank == 0, main_thread_peers(mesh)
        previous_end = read_last_stop(folder) if is_rank_0 else {}
        inputs = replace(inputs, resume_from=open_run_folder(stack, folder, config, peers))

        set_threads(config.compute.threads)
        set_deterministic(config.compute.deterministic)
        set_tf32(config.compute.tf32)
        model = build_parallel(
            inputs.model, config.precision, config.compute, device,
            seed=config.train.seed, training=True, mesh=mesh, parallel=config.parallel, recompute=config.recompute,
        )  # fmt: skip
        optimizer = build_optimizer(config.optim, model)
        average, progress, skip_messages = WeightAverage(model.masters, config.checkpoint.ema), Progress(), list[str]()
        if inputs.resume_from is not None:
            inputs, progress = resume(config, inputs, model, optimizer, average, peers, skip_messages)
        elif inputs.weights_from is not None:
            inputs = load_first_weights(inputs, inputs.weights_from, config.checkpoint.init_weights, model, peers)

        average.begin(progress.step)

        loader = Loader(
            inputs.data.train, inputs.data.order, config.batch_plan, config.train.micro_batch,
            mesh.dp.index, mesh.dp.size, prefetch_steps=config.data.prefetch_steps, pin=device.type == "cuda",
            first_step=config.first_step,
        )  # fmt: skip
        stack.callback(loader.close)
        writer = stack.enter_context(CheckpointWriter(
            folder / CHECKPOINTS, keep_last=config.checkpoint.keep_last, asynchronous=config.checkpoint.asynchronous,
            keep_every_steps=config.checkpoint.keep_every_steps, keep_best=config.checkpoint.keep_best,
            peers=saver_thread_peers(mesh), verify_after_save=config.checkpoint.verify_after_save,
            keep_steps=config.border_steps,
        ))  # fmt: skip
        if config.checkpoint.saves_before_end:  # because: a save at the end can allocate buffers then
            writer.reserve(model.owned_pieces(held_pieces(model, optimizer, average)))

        changed = changed_settings(config, inputs) if is_rank_0 else {}
        with collective_phase(peers):
            writer.scores = scores_before_resume(folder, config, progress.step) if is_rank_0 else {}
            metrics, sinks, log = open_records(stack, folder, config, inputs, progress, is_rank_0=is_rank_0)
        view = open_view(stack, console, config, inputs, model, device_name(device), progress.step, log)
        if config.checkpoint.fallback and inputs.resume_from is not None:
            skip_messages += skipped_messages(inputs.resume_from)
        show_start_notes(view, config, inputs, mesh, hosts, skip_messages)
        yield Run(
            config, inputs, folder, mesh, model, optimizer, average, progress, loader, writer, metrics, sinks, view,
            build_throughput(config, inputs, mesh, device),
            Durations(sum(p.numel() for p in model.parameters.values()), keeps_average=config.checkpoint.ema.is_on),
            Memory(str(device), mesh.rank), previous_end, changed, hosts, skipped_checkpoints=tuple(skip_messages),
        )  # fmt: skip


def open_run_folder(stack: ExitStack, folder: Path, config: RunConfig, peers: Peers) -> Path | None:
    """Lock the run's folder on rank 0 until `stack` closes, delete unfinished checkpoints and stop.json of earlier
    starts, and return the checkpoint to resume from, or None for a new run. All ranks take part.

    A failure on rank 0 is raised on every rank.
    """
    with collective_phase(peers):
        if peers.rank == 0:
            stack.enter_context(folder_lock(folder))
            clear_leftovers(folder / CHECKPOINTS)
            remove_stop(folder)
    return agree_on_resume(folder, config, peers)  # because: the sweep can restore a checkpoint


def build_throughput(config: RunConfig, inputs: Inputs, mesh: Mesh, device: torch.device) -> Throughput:
    """Build the meter of tokens per second and of MFU (model FLOPs utilization). It has the peak FLOP/s of all devices
    together, if the device's peak is known or set.
    """
    peak, kind = config.observe.peak_tflops, "tf32" if config.compute.tf32 else config.precision.kind
    peak_each = peak * 1e12 if peak else peak_flops(device_name(device), kind)
    return Throughput(
        flops_per_token=config.flops_per_token(inputs.model),
        peak=peak_each * mesh.world.size if peak_each else None,
    )


def build_optimizer(settings: OptimSettings, model: ParallelModel) -> torch.optim.Optimizer:
    """Build the optimizer over the model's parameters. If it is a OnePassAdamW, it also gets the model's half-precision
    weights, which it writes itself.

    By convention `kind: lamb` is lmtrain/optim/lamb.py with a `build` function, so that a new optimizer changes nothing
    here.
    """
    groups = build_groups(model.parameters, settings.weight_decay)
    optimizer: torch.optim.Optimizer = settings.component().build(settings, groups, model.whole_tensors)
    model.attach(optimizer)
    return optimizer
