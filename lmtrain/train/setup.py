"""Builds everything a run is made of, in the order in which it can fail: folder, model, optimizer, checkpoint, data.

Called by the command line with settings that have been judged. The second step of the staircase.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from lmtrain.checkpoint.store import CHECKPOINTS, list_broken, sweep
from lmtrain.checkpoint.writer import CheckpointWriter
from lmtrain.data.loader import Loader
from lmtrain.observe.display import RunView, build_view
from lmtrain.observe.log import RunLog
from lmtrain.observe.metrics import MetricsLog
from lmtrain.observe.tensorboard import EventWriter
from lmtrain.observe.throughput import Throughput, peak_flops
from lmtrain.optim.groups import build_groups
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.parallel.apply import ParallelModel, build_parallel
from lmtrain.runtime.device import device_name, pick_device, set_deterministic, set_threads
from lmtrain.runtime.files import atomic_file, folder_lock, write_json
from lmtrain.runtime.process import environment_report
from lmtrain.train import state
from lmtrain.train.config import RunConfig
from lmtrain.train.preflight import Inputs, find_resume, settled
from lmtrain.units import format_count


@dataclass
class Run:
    """All that the loop needs; lives as long as the `open_run` block."""

    config: RunConfig
    inputs: Inputs
    folder: Path
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    progress: state.Progress
    loader: Loader
    writer: CheckpointWriter
    metrics: MetricsLog
    events: EventWriter | None
    view: RunView
    throughput: Throughput
    device: torch.device
    reported_save: int | None = None  # the newest checkpoint that metrics and view have told of


@contextmanager
def open_run(config: RunConfig, inputs: Inputs, console: Console) -> Iterator[Run]:
    with ExitStack() as stack:
        folder = Path(config.run.dir)
        stack.enter_context(folder_lock(folder))
        checkpoints = folder / CHECKPOINTS
        sweep(checkpoints)
        inputs = replace(inputs, resume_from=find_resume(config))  # because: a sweep can bring one back

        set_threads(config.compute.threads)
        set_deterministic(config.compute.deterministic)
        device = pick_device(config.compute.device)
        model = build_parallel(
            inputs.model, config.parallel.layout, config.precision, config.compute, device,
            seed=config.train.seed, training=True,
        )
        optimizer = build_optimizer(config.optim, model)
        progress = state.Progress()
        if inputs.resume_from is not None:
            progress = state.restore(inputs.resume_from, config, inputs, model, optimizer)

        loader = Loader(
            inputs.train, inputs.data.order, config.batch_plan, config.train.micro_batch,
            prefetch_steps=config.data.prefetch_steps, pin=device.type == "cuda",
        )  # fmt: skip
        stack.callback(loader.close)
        writer = CheckpointWriter(
            checkpoints, keep_last=config.checkpoint.keep_last, asynchronous=config.checkpoint.asynchronous
        )
        stack.callback(writer.close)

        write_run_files(folder, config, inputs)
        log = RunLog(folder / "log.txt")
        stack.callback(log.close)
        metrics = stack.enter_context(MetricsLog(folder / "metrics.jsonl"))
        events = EventWriter(folder / "tensorboard", progress.step) if config.observe.tensorboard else None
        if events is not None:
            stack.callback(events.close)
        name = device_name(device)
        title = {
            "run": str(folder),
            "model": f"{inputs.model.kind} {format_count(model.num_parameters)} parameters",
            "device": f"{name} {config.precision.kind}",
            "data": f"{format_count(inputs.train.num_samples)} samples of {config.seq_len} tokens",
        }
        view = stack.enter_context(build_view(console, title, config.total_steps, log=log))
        for path in list_broken(checkpoints):
            view.note(f"{path} has no readable manifest and is passed over")
        peak = config.observe.peak_tflops
        throughput = Throughput(
            flops_per_token=inputs.model.shape.flops_per_token(config.seq_len),
            peak=peak * 1e12 if peak else peak_flops(name, config.precision.kind),
        )
        yield Run(
            config, inputs, folder, model, optimizer, progress, loader, writer, metrics, events, view,
            throughput, device,
        )


def build_optimizer(settings: OptimSettings, model: ParallelModel) -> torch.optim.Optimizer:
    """By convention `kind: lamb` is lmtrain/optim/lamb.py with a `build`; a new optimizer edits nothing here."""
    module = importlib.import_module(f"lmtrain.optim.{settings.kind}")
    optimizer: torch.optim.Optimizer = module.build(settings, build_groups(model.parameters, settings.weight_decay))
    return optimizer


def write_run_files(folder: Path, config: RunConfig, inputs: Inputs) -> None:
    """What lets somebody repeat the run: settings that compose back to it, the machine, the tokenizer."""
    write_json(folder / "config.json", settled(config, inputs).to_dict())
    write_json(folder / "environment.json", environment_report())
    with atomic_file(folder / "tokenizer.json") as file:
        file.write(inputs.tokenizer.to_bytes())
