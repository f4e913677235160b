"""Opens what a run keeps and shows of itself besides checkpoints: its settings, log, metrics, sinks and view.

Called by set-up. Only rank 0 has a folder to write to and a person to speak to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from lmtrain.checkpoint.store import list_broken
from lmtrain.observe.measure.measures import worth_by_step
from lmtrain.observe.metrics import MetricsLog
from lmtrain.observe.screen.display import RunLog, RunView, build_view
from lmtrain.observe.screen.panel import Saves
from lmtrain.observe.sinks.behind import Behind
from lmtrain.observe.sinks.tensorboard import EventWriter, TensorBoard
from lmtrain.observe.sinks.weights_and_biases import Account, WeightsAndBiases
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.model import ParallelModel
from lmtrain.runfolder.names import CHECKPOINTS, CONFIG, ENVIRONMENT, LOG, METRICS, TENSORBOARD, TOKENIZER
from lmtrain.runfolder.rows import read_last_rows, read_metrics
from lmtrain.runtime.files.files import atomic_file, write_json
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.runtime.processes.process import environment_report
from lmtrain.train.before.preflight import Inputs, settled
from lmtrain.train.config import RunConfig
from lmtrain.train.layouts.dry_run import pipeline_lines
from lmtrain.train.layouts.layout_table import layout_lines, layout_words, merged, rank_rows
from lmtrain.units import format_count


def open_records(
    stack: ExitStack, folder: Path, config: RunConfig, inputs: Inputs, step: int, *, leads: bool
) -> tuple[MetricsLog | None, Sequence[Behind], RunLog | None]:
    """What rank 0 writes for people and tools, and first what lets somebody repeat the run."""
    if not leads:
        return None, (), None
    write_json(folder / CONFIG, settled(config, inputs).to_dict())
    write_json(folder / ENVIRONMENT, environment_report())
    with atomic_file(folder / TOKENIZER) as file:
        file.write(inputs.tokenizer.to_bytes())
    log = RunLog(folder / LOG)
    stack.callback(log.close)
    metrics = MetricsLog(folder / METRICS, log.warn)
    stack.callback(metrics.close)
    sinks = list(_sinks(folder, config, inputs, step, log.warn))
    for sink in reversed(sinks):
        stack.callback(sink.close)
    return metrics, sinks, log


def _sinks(folder: Path, config: RunConfig, inputs: Inputs, step: int, say: Callable[[str], None]) -> Iterator[Behind]:
    settings, observe = settled(config, inputs).to_dict(), config.observe
    if observe.tensorboard:

        def open_tensorboard(tell: Callable[[str], None]) -> TensorBoard:
            return TensorBoard(EventWriter(folder / TENSORBOARD, step, say=tell), settings, time.time())

        yield Behind("TensorBoard", open_tensorboard, say)
    if observe.wandb != "none":
        name = observe.wandb_name or folder.resolve().name
        project = observe.wandb_project or "lmtrain"
        account = Account(observe.wandb, project, observe.wandb_entity, name, observe.wandb_tags)
        yield Behind("Weights & Biases", lambda tell: WeightsAndBiases(folder, account, settings), say)


def worth_before(folder: Path, config: RunConfig, step: int) -> dict[int, float]:
    """What the checkpoints are worth up to the one that the run goes on from, if that decides which of them stay."""
    rows = read_metrics(folder / METRICS) if config.checkpoint.keep_best else []
    found = worth_by_step(rows, config.checkpoint.best_by)
    return {measured: worth for measured, worth in found.items() if measured <= step}


def start_number(folder: Path) -> int:
    """Which start of the run this is, by its rows: a checkpoint knows nothing of others that began from it."""
    attempts = [row.get("attempt") for row in read_last_rows(folder / METRICS)]
    return 1 + max((one for one in attempts if type(one) is int), default=0)


def open_view(
    stack: ExitStack, console: Console, config: RunConfig, inputs: Inputs, model: ParallelModel, device: str, step: int,
    log: RunLog | None,
) -> RunView:  # fmt: skip
    """`device` is its name."""
    title = {
        "run": str(Path(config.run.dir)),
        "model": f"{inputs.model.kind} {format_count(model.num_parameters)} parameters",
        "device": f"{device} {config.precision.kind}",
        "data": f"{format_count(inputs.data.train.num_samples)} samples of {config.seq_len} tokens",
    } | ({"layout": layout_words(config.parallel)} if model.mesh.world.size > 1 else {})
    # because: a panel in which nothing will ever move looks like a run that hangs
    moves = model.mesh.rank == 0 and step < config.total_steps
    saves = Saves(config.checkpoint.interval_steps, config.checkpoint.interval_s)
    view = (
        build_view(console, title, config.total_steps, log=log, saves=saves)
        if moves
        else RunView(console, title, config.total_steps, log)
    )
    stack.enter_context(view)
    if log is not None:
        log.line("\n".join(["applied to the model:", *model.applied]))
    return view


def show_beginning(
    view: RunView, config: RunConfig, inputs: Inputs, mesh: Mesh, hosts: Sequence[str], passed: Iterable[str]
) -> None:
    """What a person should know before the first step; `passed` are checkpoints that are not gone on from, in words."""
    fault_point("start.loop")
    if mesh.rank == 0 and inputs.data.said:
        view.note(f"validation reads {inputs.data.said}")
    if mesh.rank == 0 and mesh.world.size > 1:
        rows = merged(rank_rows(config, inputs.model, hosts))
        view.note("\n".join([*pipeline_lines(config, inputs.model), *layout_lines(rows)]))
    for text in passed:
        view.note(f"warning: {text}")
    for path in list_broken(Path(config.run.dir) / CHECKPOINTS) if mesh.rank == 0 else ():
        if not any(text.startswith(f"{path} ") for text in passed):
            view.note(f"warning: {path} has no readable manifest and is left as it is")
