"""Records and screen output of a run, except checkpoints: opened here at the start, then written during training.

Called by set-up, the loop and validation, on every process. Only rank 0 writes to the run's folder and shows messages;
numbers in rows are global.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from lmtrain.batch import StepBatches
from lmtrain.checkpoint.find_and_prune import list_broken
from lmtrain.config.settings_base import show
from lmtrain.errors import OutputError, StorageError, error_from_peer
from lmtrain.models.model_settings import unpadded_shapes
from lmtrain.observe.measure.process_and_gpu_memory import device_peak_bytes
from lmtrain.observe.metrics import MetricsLog
from lmtrain.observe.screen.live_panel import SaveSchedule
from lmtrain.observe.screen.training_view import RunLog, RunView, build_view
from lmtrain.observe.sinks.queued_sink import QueuedSink
from lmtrain.observe.sinks.tensorboard import EventWriter, TensorBoardSink
from lmtrain.observe.sinks.weights_and_biases import Account, WeightsAndBiases
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.parallel.tp_linears_and_collectives import all_reduce
from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_rank_bytes
from lmtrain.runfolder.file_names import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    LINEAGE,
    LOG,
    METRICS,
    SLURM_JOB,
    TENSORBOARD,
    TOKENIZER,
    WORKING_DIRECTORY,
)
from lmtrain.runfolder.metrics_rows import read_last_rows, read_metrics, row_step
from lmtrain.runfolder.run_facts import facts_at, padded_parameters
from lmtrain.runfolder.tensorboard_metric_names import EDGES, Histogram, score_by_step
from lmtrain.runtime.files.atomic_files import atomic_file, read_json, write_json
from lmtrain.runtime.machine.choose_device import device_name
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.runtime.processes.process_environment import SlurmJob, environment_report
from lmtrain.train.layouts.dry_run_speed_and_memory import COMPARED_STEPS, pipeline_lines, planned_run, predict_step
from lmtrain.train.layouts.ranks_and_memory_table import layout_lines, merge_rows, padding_lines, rank_rows
from lmtrain.train.ranks.facts_equal_on_all_ranks import FILE_DIGESTS, file_digests
from lmtrain.train.record.changed_settings_and_rate import change_lines
from lmtrain.train.run_config import RunConfig
from lmtrain.train.run_objects_and_resume import Progress, Run, checkpoint_state, held_pieces
from lmtrain.train.startup_checks.preflight import Inputs, with_final_model
from lmtrain.train.step import StepResult
from lmtrain.units import format_bytes, format_count, format_seconds, plural

_MAX_FILE_BYTES = 1 << 18  # bytes of settings; because: readers of rows refuse a row of 1 MiB
_CHUNK = 1 << 22  # numbers; because: their bucket indices take as much memory again
WEIGHTS, GRADIENTS = "weights", "gradients"
MAX_FAILED_SAVES = 3  # failed checkpoints in a row that end the run
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def open_records(
    stack: ExitStack, folder: Path, config: RunConfig, inputs: Inputs, progress: Progress, *, is_rank_0: bool
) -> tuple[MetricsLog | None, Sequence[QueuedSink], RunLog | None]:
    """Write the run's settings, environment and tokenizer to its folder, and return (log of metrics rows, sinks such as
    TensorBoard, text log) for writing during training. `stack` closes them. Other ranks than 0 get (None, (), None) and
    write nothing.
    """
    if not is_rank_0:
        return None, (), None
    # because: a start that trains nothing would otherwise record settings that never trained
    goes_on = not progress.is_over(config.total_steps) or not (folder / CONFIG).is_file()
    if goes_on:
        write_json(folder / CONFIG, with_final_model(config, inputs).to_dict())
        place: dict[str, Any] = {WORKING_DIRECTORY: str(Path.cwd())}
        place |= {SLURM_JOB: job.number} if (job := SlurmJob.detect()) is not None else {}
        write_json(folder / ENVIRONMENT, environment_report() | place)
        with atomic_file(folder / TOKENIZER) as file:
            file.write(inputs.tokenizer.to_bytes())
        if inputs.lineage:
            write_json(folder / LINEAGE, [parent.to_dict() for parent in inputs.lineage])
    log = RunLog(folder / LOG)
    stack.callback(log.close)
    metrics = MetricsLog(folder / METRICS, log.warn)
    stack.callback(metrics.close)
    sinks = list(_open_sinks(folder, config, inputs, progress.step, log.warn)) if goes_on else []
    for sink in reversed(sinks):
        stack.callback(sink.close)
    return metrics, sinks, log


def _open_sinks(
    folder: Path, config: RunConfig, inputs: Inputs, step: int, report: Callable[[str], None]
) -> Iterator[QueuedSink]:
    """Yield a queue in front of each configured sink of metrics, TensorBoard and Weights & Biases. `step` is the step
    from which the run goes on; `report` receives the sinks' warnings.
    """
    settings, observe = with_final_model(config, inputs).to_dict(), config.observe
    if observe.tensorboard:
        yield QueuedSink(
            "TensorBoard",
            lambda warn: TensorBoardSink(EventWriter(folder / TENSORBOARD, step, report=warn), settings, time.time()),
            report,
        )  # fmt: skip
    if observe.wandb != "none":
        account = Account(
            observe.wandb, observe.wandb_project or "lmtrain", observe.wandb_entity,
            observe.wandb_name or folder.resolve().name, observe.wandb_tags,
        )  # fmt: skip
        yield QueuedSink("Weights & Biases", lambda warn: WeightsAndBiases(folder, account, settings), report)


def scores_before_resume(folder: Path, config: RunConfig, step: int) -> dict[int, float]:
    """Return step -> score of the measure checkpoint.best_by (negated if smaller is better), for steps up to `step`,
    from which the run resumes; {} unless checkpoint.keep_best is set. Rows that cannot be read refuse the start, so
    call this before `open_records`.
    """
    path = folder / METRICS
    rows = read_metrics(path) if config.checkpoint.keep_best and path.exists() else []
    return {at: score for at, score in score_by_step(rows, config.checkpoint.best_by).items() if at <= step}


def start_number(folder: Path) -> int:
    """Return the number of this start of the run, from 1: one more than the highest `attempt` in the rows of metrics. A
    checkpoint cannot tell it, since other starts may have resumed from it.
    """
    attempts = [row.get("attempt") for row in read_last_rows(folder / METRICS)]
    return 1 + max((number for number in attempts if type(number) is int), default=0)


def open_view(
    stack: ExitStack, console: Console, config: RunConfig, inputs: Inputs, model: ParallelModel, device: str, step: int,
    log: RunLog | None,
) -> RunView:  # fmt: skip
    """Open the screen output of a run: a live panel on rank 0 if steps are left to do, else plain lines. `device` is
    the device's name, `step` the step from which the run goes on, and `log` also receives the lines.
    """
    epoch = plural(steps := inputs.steps_per_epoch(config.train.global_batch), "step", format_count(steps))
    now = facts_at(with_final_model(config, inputs), step, state="running", stage_name=config.stage_name)
    title = {
        "run": str(Path(config.run.dir)),
        "model": f"{inputs.model.kind}, {now.parameters_text}",
        "device": f"{device} {config.precision.kind}",
        "batch": now.batch_text,
        "data": f"{now.data}, {plural(inputs.data.train.num_samples, 'sample')}, {epoch} an epoch",
    } | ({"layout": config.parallel.layout_text} if model.mesh.world.size > 1 else {})
    # because: a panel that never moves looks like a hung run
    is_live = model.mesh.rank == 0 and step < config.total_steps
    saves = SaveSchedule(config.checkpoint.interval_steps, config.checkpoint.interval_s)
    start = {"step": step} | ({"stage": now.stage_name} if now.stage_name else {})
    stages = {stage.name: stage.last_step for stage in now.named_stages}
    view = stack.enter_context(
        build_view(console, title, config.total_steps, log=log, saves=saves, stages=stages, start=start)
        if is_live
        else RunView(console, title, config.total_steps, log)
    )
    if log is not None:
        log.write("\n".join(["applied to the model:", *model.applied]))
    return view


def show_start_notes(
    view: RunView, config: RunConfig, inputs: Inputs, mesh: Mesh, hosts: Sequence[str], skip_messages: Iterable[str]
) -> None:
    """Show notes on rank 0 before the first step: which data validation reads, pipeline stages, the table of ranks, the
    warnings `skip_messages` on checkpoints that the resume skipped, and unreadable checkpoints. `hosts` has each rank's
    host name.
    """
    fault_point("start.loop")
    if mesh.rank > 0:
        return
    if inputs.data.validation_note:
        view.show_note(f"validation reads {inputs.data.validation_note}")
    if mesh.world.size > 1:
        rows = merge_rows(rank_rows(config, inputs.model, hosts))
        padding = padding_lines(inputs.model.num_parameters, padded_parameters(inputs.model))
        view.show_note("\n".join([*pipeline_lines(config, inputs.model), *layout_lines(rows), *padding]))
    for text in skip_messages:
        view.show_note(f"warning: {text}")
    for path in list_broken(Path(config.run.dir) / CHECKPOINTS):
        if not any(text.startswith(f"{path} ") for text in skip_messages):
            view.show_note(f"warning: {path} has no readable manifest and is left as it is")


def read_run_files(folder: Path) -> dict[str, Any]:
    """Return the settings and the environment from the files in the run's folder, for the "start" row of metrics; a
    file above 256 KiB is left out.
    """
    paths = {"settings": folder / CONFIG, "environment": folder / ENVIRONMENT}
    return {name: read_json(path) for name, path in paths.items() if path.stat().st_size < _MAX_FILE_BYTES}


def weights_digest(model: ParallelModel) -> str:
    """Return a 64-bit digest of all weights, as hex, that is the same at any layout and changes with any single bit.

    The digest is the sum of the weights' bits as integers, with each tensor's sum times an odd factor of its own. All
    ranks take part, in an all-reduce over the world.
    """
    total = torch.zeros((), dtype=torch.int64, device=model.device)
    for piece in model.owned_pieces(model.pieces()):
        bits = piece.block.detach().view(_INTEGERS[piece.block.element_size()])
        total += bits.sum(dtype=torch.int64) * (2 * crc32(piece.name.encode()) + 1)
    if model.mesh.world.size > 1:
        with current_phase.within("collective", "the digest of the first weights"):
            # collective: each rank's part of the sum over the world, once a start
            dist.all_reduce(total, group=model.mesh.world.group)
    return f"{int(total) % (1 << 64):016x}"  # sync: once a start


def samples_hash(sample_ids: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    """Return 16 hex digits of a SHA-256 over these sample ids in their order, so that two runs' data can be compared
    row by row.
    """
    return hashlib.sha256(sample_ids.astype("<i8").tobytes()).hexdigest()[:16]


def batch_digest(batches: StepBatches) -> str:
    """Return a CRC-32, as hex, of the token ids in this rank's micro-batches of a step. Unlike a hash of the sample ids
    it changes if a dataset's text changes.
    """
    digest = 0
    for batch in batches.microbatches:
        digest = crc32(batch.tokens_BT.numpy(), digest)
    return f"{digest:08x}"


@torch.no_grad()
def build_histograms(model: ParallelModel) -> dict[str, Histogram]:
    """Return name -> Histogram for each weight after the update (`weights/NAME`) and for each gradient, summed over
    ranks and clipped, as the update used it (`gradients/NAME`).

    Counts are the same at every layout. Tensors without a finite number are left out. All ranks take part, in
    all-reduces over the world.
    """
    names = [f"{what}/{name}" for what in (WEIGHTS, GRADIENTS) for name in unpadded_shapes(model.settings)]
    row_of, device = {name: row for row, name in enumerate(names)}, model.device
    edges = torch.tensor(EDGES, device=device)
    counts = torch.zeros(len(names), len(EDGES) + 1, dtype=torch.int64, device=device)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    extremes = torch.full((len(names), 2), -torch.inf, dtype=torch.float64, device=device)  # maxima of -x and of x
    gradients = {name: p.grad for name, p in model.parameters.items() if p.grad is not None}
    # the update's factor on the gradients
    clipped = None if model.one_pass_optimizer is None else model.one_pass_optimizer.gradient_factor
    for what, tensors, factor in ((WEIGHTS, model.parameters, None), (GRADIENTS, gradients, clipped)):
        for piece in model.owned_pieces(model.pieces_of(tensors, what)):
            row = row_of[piece.name.replace(".", "/", 1)]
            for chunk in piece.block.flatten().split(_CHUNK):
                numbers = chunk if factor is None else chunk * factor
                _add_to_histogram(numbers[numbers.isfinite()].float(), edges, counts[row], sums[row], extremes[row])
    for tensor, op in ((counts, dist.ReduceOp.SUM), (sums, dist.ReduceOp.SUM), (extremes, dist.ReduceOp.MAX)):
        # collective: each rank's counts of the numbers that it owns, over the world
        all_reduce(tensor, model.mesh.world, op, wait_name="histograms")
    rows = zip(names, counts.tolist(), sums.tolist(), extremes.tolist(), strict=True)  # sync: they are read once
    return {
        name: Histogram(-below, above, total, squares, row)
        for name, row, (total, squares), (below, above) in rows
        if any(row)
    }


def _add_to_histogram(numbers: Tensor, edges: Tensor, counts: Tensor, sums: Tensor, extremes: Tensor) -> None:
    """Add the values x in `numbers` to the tensors of a histogram, in place: `counts` has the number of values in each
    bucket between `edges`, `sums` the sums of x and of x squared, `extremes` the maxima of -x and of x.
    """
    if not numbers.numel():
        return
    counts += torch.bincount(torch.bucketize(numbers, edges, out_int32=True), minlength=len(counts))
    wide = numbers.double()
    sums += torch.stack([wide.sum(), wide.square().sum()])
    extremes.copy_(torch.maximum(extremes, torch.stack([-wide.min(), wide.max()])))


def record_start(run: Run) -> None:
    """Write the "start" row of metrics (checkpoint, digest of the weights, settings, device), and show notes on where
    the run begins. If the previous training stage was trained in this same start, write a "stage" row instead. All
    ranks must call this, since the digest needs an all-reduce.
    """
    if run.inputs.follows_stage:
        _record_stage(run)
        return
    run.progress.attempt = start_number(run.folder) if run.metrics is not None else 1
    resumed, weights = run.inputs.resume_from, run.inputs.weights_from
    began_at: dict[str, Any] = {
        "resumed_from": resumed and str(resumed), "weights_from": weights and str(weights),
        "weights_digest": weights_digest(run.model), "data_sha256": run.inputs.data.content_sha256,
        "tokens": run.progress.tokens, "device": device_name(run.model.device), "world_size": run.mesh.world.size,
    }  # fmt: skip
    began_at |= {FILE_DIGESTS: digests} if (digests := file_digests(run.config)) else {}
    began_at |= read_run_files(run.folder) if run.metrics is not None else {}
    began_at |= {"before": run.previous_end} if run.progress.attempt > 1 else {}
    record(run, "start", began_at | ({"passed_over": list(run.skipped_checkpoints)} if run.skipped_checkpoints else {}))
    for line in _start_lines(run) if run.metrics is not None else ():
        run.view.show_note(line)


def _start_lines(run: Run) -> Iterator[str]:
    """Yield lines of text for the screen, after the "start" row is written: warnings, the checkpoint that the run
    resumes from or whose weights it begins with, changed settings, and steps that are lost. Only rank 0 calls this.
    """
    resumed, weights, total = run.inputs.resume_from, run.inputs.weights_from, run.config.total_steps
    yield from (f"warning: {warning}" for warning in run.inputs.warnings)
    if resumed is not None and run.progress.is_over(total):
        yield f"nothing is left to do: {resumed} is step {total} of {total}"
        if run.changed_settings:
            old_values = ", ".join(f"{key}={show(old)}" for key, (old, _) in run.changed_settings.items())
            yield f"the run is finished, so its settings stay as they were: {old_values}"
    elif resumed is not None:
        yield f"continuing from {resumed} at step {run.progress.step}"
        yield from change_lines(run)
    elif weights is not None:
        yield f"a new run with the weights of {weights}"
    reached = max(map(row_step, read_last_rows(run.folder / METRICS)), default=0) if resumed is None else 0
    if reached:
        yield f"warning: the {reached} steps before have left no checkpoint; the run begins at step 1 again"
        yield from change_lines(run)


def record(run: Run, event: str, values: dict[str, Any]) -> dict[str, Any]:
    """Add step, attempt and time to `values`, append the row to metrics.jsonl and the sinks on rank 0, show it, and
    return it on every rank. `event` is the kind of row, such as "step" or "valid".
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    row = {"event": event, "step": run.progress.step, "attempt": run.progress.attempt, "time": now} | values
    if run.config.stage_name:
        row |= {"stage": run.config.stage_name, "stage_number": run.config.stage_number}
    if run.metrics is not None:
        run.metrics.append(row)
        for sink in run.sinks:
            sink.write_row(row)
    run.view.show_row(row)
    return row


def report_step(run: Run, batches: StepBatches, result: StepResult, lr: float, elapsed_s: float) -> None:
    """Write the "step" row of metrics for a finished step and show it on the screen. `lr` is the step's learning rate,
    `elapsed_s` the time since this start of the run began.
    """
    rates, progress, scale = run.throughput.rates(run.config.total_steps), run.progress, run.model.loss_scale
    memory, rank = run.memory.fullest()
    # because: a loss with a single term equals that term
    terms = {f"loss/{term}": mean for term, mean in result.terms.items() if len(result.terms) > 1}
    record(
        run, "step",
        {
            "loss": result.loss, **terms, **({} if result.z_loss is None else {"z_loss": result.z_loss}),
            "lr": lr, "grad_norm": result.grad_norm, "skipped": progress.skipped,
            **({"loss_scale": scale.value} if scale.dynamic else {}),
            "samples": progress.samples, "tokens": progress.tokens, "samples_hash": samples_hash(batches.sample_ids),
            "batch_digest": batch_digest(batches) if run.metrics is not None else None,
            "tokens_per_s": rates.tokens_per_s, "flops_per_s": rates.flops_per_s, "mfu": rates.mfu,
            "data_wait_s": run.loader.data_wait_s, "memory_bytes": memory, "memory_rank": rank,
            "elapsed_s": elapsed_s, "eta_s": rates.eta_s, **progress.take_source_values(run.inputs.data.parts),
            **_optional_step_values(run),
        },
    )  # fmt: skip
    if (peaks := run.memory.grown_peaks()) is not None:
        record(run, "memory", {"peak_bytes": peaks})


def report_occasional(run: Run) -> None:
    """Compare the step time with the planner's prediction after the first steps, and send histograms to the sinks every
    observe.histograms_every_steps steps. All ranks take part.
    """
    report_forecast(run)
    interval = run.config.observe.histograms_every_steps
    if interval is not None and run.progress.step % interval == 0:
        histograms = build_histograms(run.model)
        for sink in run.sinks:
            sink.write_histograms(run.progress.step, histograms)


def _optional_step_values(run: Run) -> dict[str, Any]:
    """Return those entries of a "step" row that are known: `limit_left_s`, the seconds until a time limit ends the run,
    and values on slow ranks; {} if none is.
    """
    left_s = run.durations.left_s()
    values = {} if left_s is None else {"limit_left_s": round(left_s, 1)}
    return values | (run.durations.stragglers.facts() if run.durations.stragglers is not None else {})


def report_forecast(run: Run) -> None:
    """Write a "forecast" row with the measured and the predicted step time, and show it. This happens once, after
    COMPARED_STEPS steps, on rank 0, if config.hardware names a machine.
    """
    config, hardware = run.config, run.config.hardware
    if run.durations.num_steps != COMPARED_STEPS or hardware is None or run.mesh.rank != 0:
        return
    durations = run.durations.newest_steps_s()
    batches = [config.batch_plan.range_of(run.progress.step - 1 - ago)[1] for ago in range(len(durations))]
    expected, step_s = predict_step(planned_run(config, run.inputs.model), hardware, batches), median(durations)
    words, peak = expected.comparison_text(step_s), device_peak_bytes(str(run.model.device))
    if peak is not None:
        predicted_bytes = sum(count_rank_bytes(planned_run(config, run.inputs.model), 0).values())
        words += f"; memory is {format_bytes(peak)}, with {format_bytes(predicted_bytes)} predicted"
    record(run, "forecast", expected.facts() | {"measured_step_s": step_s, "hardware": hardware.name, "said": words})
    run.view.show_note(words)


def report_measures(run: Run, row: dict[str, Any]) -> None:
    """Give the scores in `row`, a row of measures, to the checkpoint writer, which keeps the best checkpoints by
    them.
    """
    run.writer.scores = {**run.writer.scores, **score_by_step([row], run.config.checkpoint.best_by)}


def report_save(run: Run) -> None:
    """Write a "save" row with size and duration of the newest finished checkpoint, and show it. Do nothing if there is
    none, or if this checkpoint was reported already.
    """
    last = run.writer.last
    if last is None or last.step == run.reported_save:
        return
    run.reported_save, run.failed_saves = last.step, 0
    run.durations.add_save(last.write_s, last.stall_s)
    record(run, "save", {
        "saved_step": last.step, "bytes": last.num_bytes, "write_s": last.write_s, "stall_s": last.stall_s,
        "bytes_per_s": last.bytes_per_s,
    })  # fmt: skip
    run.view.show_note(
        f"saved step {last.step}: {format_bytes(last.num_bytes)} in {format_seconds(last.write_s)} "
        f"({format_bytes(last.bytes_per_s)}/s), "
        f"training stood still for {last.stall_s * 1000:.0f} ms"
    )


def _record_stage(run: Run) -> None:
    """Write the "stage" row of metrics, with digests of weights and data, and show which training stage begins. All
    ranks must call this, since the digest of the weights needs an all-reduce.
    """
    run.progress.attempt = start_number(run.folder) - 1 if run.metrics is not None else 1
    record(run, "stage", {"weights_digest": weights_digest(run.model), "data_sha256": run.inputs.data.content_sha256})
    config = run.config
    now = facts_at(config, config.first_step, state="running", stage_name=config.stage_name)
    cells = now.stage.cells() if now.stage else {}
    run.view.show_note(
        f"the stage {config.stage_name} begins after step {config.first_step} and ends after step {config.end_step}: "
        f"{cells['batch']} samples of {cells['sequence']} tokens in a step of {cells['<data']}, learning rate "
        f"{cells['learning rate']}"
    )


def save(run: Run) -> int:
    """Start to save a checkpoint of the current step, after waiting for the previous save, and return the step. If a
    save fails, show its error and return all the same; after MAX_FAILED_SAVES failures in a row, raise an error. All
    ranks take part.
    """
    try:
        run.writer.wait()
        report_save(run)
    except (StorageError, OutputError) as error:
        _report_failed_save(run, "The checkpoint before this one", error)
    saved_average = run.average if run.average.has_begun else None
    try:
        with current_phase.within("save"):
            run.writer.save(
                run.progress.step,
                run.model.owned_pieces(held_pieces(run.model, run.optimizer, saved_average)),
                checkpoint_state(run.config, run.inputs, run.model, run.optimizer, run.progress, saved_average),
                {"tokenizer.json": run.inputs.tokenizer.to_bytes()} | dict(run.inputs.extra_files),
            )
    except (StorageError, OutputError) as error:
        _report_failed_save(run, f"The checkpoint of step {run.progress.step}", error)
    return run.progress.step


def _report_failed_save(run: Run, subject: str, error: StorageError | OutputError) -> None:
    """Count a failed save and show `error` after the words "`subject` failed". Raise an error with the same exit code
    instead if MAX_FAILED_SAVES saves in a row have failed.
    """
    run.failed_saves += 1
    if run.failed_saves == MAX_FAILED_SAVES:
        # because: further training would most likely be lost as well
        raise error_from_peer(
            error.exit_code,
            f"The run stops, since {MAX_FAILED_SAVES} checkpoints in a row could not be saved; the last error: {error}",
        ) from error
    run.view.show_note(f"{subject} failed: {error} Training goes on.")
