"""What a run writes about itself while it trains: rows of metrics, lines of the view, TensorBoard's scalars.

Called by the loop and by validation, on every process; only rank 0 has somewhere to write. Numbers in rows are global.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np

from lmtrain.data.loader import StepBatches
from lmtrain.observe.measures import measures_of, worth_by_step
from lmtrain.observe.memory import device_peak_bytes, memory_bytes
from lmtrain.plan.ranks import rank_bytes_of
from lmtrain.train.forecast import COMPARED_STEPS, expected_step, planned_of
from lmtrain.train.setup import Run
from lmtrain.train.step import StepResult
from lmtrain.units import format_bytes, format_seconds

_TAGS = {
    "loss/train": "loss", "optim/lr": "lr", "optim/grad_norm": "grad_norm", "speed/tokens_per_s": "tokens_per_s",
    "speed/mfu": "mfu", "speed/data_wait_s": "data_wait_s", "memory/bytes": "memory_bytes",
}  # fmt: skip


def record_start(run: Run) -> None:
    """From what it begins, and what a person should know of that."""
    resumed, weights, total = run.inputs.resume_from, run.inputs.weights_from, run.config.total_steps
    began_at = {"resumed_from": resumed and str(resumed), "weights_from": weights and str(weights)}
    record(run, "start", began_at | ({"passed_over": list(run.passed_over)} if run.passed_over else {}))
    for warning in run.inputs.warnings:
        run.view.note(f"warning: {warning}")
    if resumed is not None and run.progress.step == total:
        run.view.note(f"nothing is left to do: {resumed} is step {total} of {total}")
    elif resumed is not None:
        run.view.note(f"continuing from {resumed} at step {run.progress.step}")
    elif weights is not None:
        run.view.note(f"a new run with the weights of {weights}")


def record(run: Run, event: str, values: dict[str, Any]) -> dict[str, Any]:
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    row = {"event": event, "step": run.progress.step, "attempt": run.progress.attempt, "time": time} | values
    if run.metrics is not None:
        run.metrics.append(row)
    return row


def report_step(run: Run, batches: StepBatches, result: StepResult, lr: float, elapsed_s: float) -> None:
    rates, progress = run.throughput.rates(run.config.total_steps), run.progress
    row = record(
        run, "step",
        {
            "loss": result.loss, **_terms(result), "lr": lr, "grad_norm": result.grad_norm, "skipped": progress.skipped,
            "samples": progress.samples, "tokens": progress.tokens, "samples_hash": samples_hash(batches.sample_ids),
            "tokens_per_s": rates.tokens_per_s, "flops_per_s": rates.flops_per_s, "mfu": rates.mfu,
            "data_wait_s": run.loader.data_wait_s, "memory_bytes": memory_bytes(str(run.device)),
            "elapsed_s": elapsed_s, "eta_s": rates.eta_s,
        },
    )  # fmt: skip
    run.view.step(row)
    if run.events is not None:
        tags = {**_TAGS, **{key: key for key in _terms(result)}}
        for tag, key in tags.items():
            if row[key] is not None:
                run.events.scalar(tag, row[key], progress.step)


def report_forecast(run: Run) -> None:
    """How far the first steps were off what the planner had predicted; once, on rank 0."""
    config, hardware = run.config, run.config.hardware
    if run.costs.num_steps != COMPARED_STEPS or hardware is None or run.mesh.rank != 0:
        return
    seen = run.costs.newest_steps_s()
    batches = [config.batch_plan.range_of(run.progress.step - 1 - ago)[1] for ago in range(len(seen))]
    expected, step_s = expected_step(planned_of(config, run.inputs.model), hardware, batches), median(seen)
    words, peak = expected.compared_with(step_s), device_peak_bytes(str(run.device))
    if peak is not None:
        held = sum(rank_bytes_of(planned_of(config, run.inputs.model), 0).values())
        words += f"; memory is {format_bytes(peak)}, with {format_bytes(held)} predicted"
    record(run, "forecast", expected.facts() | {"measured_step_s": step_s, "hardware": hardware.name, "said": words})
    run.view.note(words)


def report_measures(run: Run, row: dict[str, Any]) -> None:
    """What a row has measured, for TensorBoard and for the choice of the best checkpoint."""
    run.writer.worth = {**run.writer.worth, **worth_by_step([row], run.config.checkpoint.best_by)}
    if run.events is not None:
        for tag, value in measures_of(row).items():
            run.events.scalar(tag, value, run.progress.step)


def _terms(result: StepResult) -> dict[str, float]:
    """A loss of one term says nothing more by its parts."""
    return {f"loss/{term}": mean for term, mean in result.terms.items() if len(result.terms) > 1}


def samples_hash(sample_ids: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    """A short name for exactly these samples in this order, so that two runs' data can be compared row by row."""
    return hashlib.sha256(sample_ids.astype("<i8").tobytes()).hexdigest()[:16]


def report_save(run: Run) -> None:
    """A row for the newest finished checkpoint, once."""
    last = run.writer.last
    if last is None or last.step == run.reported_save:
        return
    run.reported_save, run.failed_saves = last.step, 0
    run.costs.saved(last.write_s, last.stall_s)
    values = {"saved_step": last.step, "bytes": last.num_bytes, "write_s": last.write_s, "stall_s": last.stall_s}
    values["bytes_per_s"] = last.bytes_per_s
    run.view.saved(
        record(run, "save", values),
        f"saved step {last.step}: {format_bytes(last.num_bytes)} in {format_seconds(last.write_s)} "
        f"({format_bytes(last.bytes_per_s)}/s), "
        f"training stood still for {last.stall_s * 1000:.0f} ms",
    )
