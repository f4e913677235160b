"""The training loop, read downward: a step, its row of metrics, now and then a validation and a checkpoint.

Called by the command line with a Run, on every process of it. Everything that happens during training happens in
`train`; numbers in rows are global, and only rank 0 has somewhere to write them.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmtrain.batch import Batch
from lmtrain.data.dataset import Dataset, count_labels
from lmtrain.data.loader import StepBatches
from lmtrain.errors import OutputError, StorageError
from lmtrain.observe.memory import memory_bytes
from lmtrain.runtime.faults import fault_point
from lmtrain.runtime.signals import StopRequest
from lmtrain.train import state
from lmtrain.train.peers import StopVote
from lmtrain.train.setup import Run
from lmtrain.train.step import StepResult, train_step
from lmtrain.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Summary:
    step: int
    loss: float | None  # of the last step of this attempt
    valid_loss: float | None
    seconds: float
    tokens: int
    stopped_by: str | None  # the signal that ended the run early


def train(run: Run) -> Summary:
    config, progress, view = run.config, run.progress, run.view
    total, began = config.total_steps, time.monotonic()
    last_saved = progress.step if run.inputs.resume_from is not None else None
    keep = config.checkpoint.interval_steps is not None
    loss = valid_loss = None
    resumed, weights = run.inputs.resume_from, run.inputs.weights_from
    _record(run, "start", {"resumed_from": resumed and str(resumed), "weights_from": weights and str(weights)})
    if resumed is not None:
        view.note(f"continuing from {resumed} at step {progress.step}")
    elif weights is not None:
        view.note(f"a new run with the weights of {weights}")

    stopped_by = None
    vote = StopVote(run.mesh)
    with StopRequest() as stop:
        run.throughput.start(progress.step, time.monotonic())
        for batches in run.loader.steps(progress.step, total):
            fault_point("step", batches.step)
            vote.ask(stop)
            lr = config.optim.lr * config.schedule.factor(batches.step, total)
            result = train_step(run.model, run.optimizer, batches, lr, config.optim.clip_norm)
            loss = result.loss
            progress.step += 1
            progress.samples += batches.num_samples
            progress.tokens += batches.num_samples * config.seq_len
            progress.skipped += result.skipped
            now = time.monotonic()
            run.throughput.step_done(progress.step, now, batches.num_samples * config.seq_len)

            stopped_by = vote.answer(stop)
            done = progress.step == total or stopped_by is not None
            if progress.step % config.observe.log_interval_steps == 0 or done:
                _report_step(run, batches, result, lr, now - began)
            if _due(progress.step, config.train.valid_interval_steps) or (progress.step == total and run.inputs.valid):
                valid_loss = validate(run)
                run.throughput.start(progress.step, time.monotonic())
            if keep and (_due(progress.step, config.checkpoint.interval_steps) or done):
                last_saved = save(run)
            if done:
                break

        if keep and last_saved != progress.step:
            save(run)
        run.writer.wait()  # a failure of the last checkpoint is the run's failure
        _report_save(run)
    stopped_by = stopped_by if progress.step < total else None
    _record(run, "stop", {"stopped_by": stopped_by, "elapsed_s": time.monotonic() - began})
    return Summary(progress.step, loss, valid_loss, time.monotonic() - began, progress.tokens, stopped_by)


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and step % interval == 0


def validate(run: Run) -> float:
    """Mean loss over the first `valid_samples` samples of the validation documents: the same ones every time.

    Of several terms the loss is the sum of their means; perplexity and accuracy are the first's, that of tokens.
    """
    valid, dp, terms = run.inputs.valid, run.mesh.dp, run.model.terms
    assert valid is not None
    ids = np.arange(min(run.config.train.valid_samples, valid.num_samples))
    batches = valid_batches(valid, ids, run.config.train.micro_batch, dp.index, dp.size)
    sums = torch.stack(list(run.model.valid_sums(batches))).sum(0).tolist()  # sync: validation ends
    counts = count_labels(valid, ids, valid.batch(ids[:1]))
    means, hits = ([one / num for one, num in zip(row, counts, strict=True)] for row in sums)
    loss = math.fsum(means)
    row = {"loss": loss, "ppl": math.exp(min(means[0], _MOST_NATS)), "accuracy": hits[0]}
    row |= {"samples": len(ids), "tokens": counts[0]}
    row |= {f"loss/{term}": mean for term, mean in zip(terms, means, strict=True) if len(terms) > 1}
    row |= {f"accuracy/{term}": share for term, share in zip(terms[1:], hits[1:], strict=True)}
    run.view.valid(_record(run, "valid", row))
    if run.events is not None:
        tags = {"loss/valid": loss} | {f"valid/{k}": v for k, v in row.items() if "/" in k or k in _QUALITY}
        for tag, value in tags.items():
            run.events.scalar(tag, value, run.progress.step)
    return loss


def valid_batches(
    valid: Dataset, ids: np.ndarray[Any, np.dtype[np.int64]], size: int, dp_index: int, dp_size: int
) -> Iterator[Batch]:
    """Every dp_size-th batch. Each rank has equally many, as they compute together: one too few ends with no labels."""
    starts = range(0, len(ids), size)
    for first in starts[::dp_size]:
        mine = first + dp_index * size
        if mine in starts:
            yield valid.batch(ids[mine : mine + size]).map(torch.from_numpy)
        else:
            yield valid.batch(ids[first : first + size]).unlabelled().map(torch.from_numpy)


def save(run: Run) -> int:
    """Begin a checkpoint of this step. A save that fails is said and survived: the run goes on to the next one."""
    try:
        run.writer.wait()
        _report_save(run)
    except (StorageError, OutputError) as error:
        run.view.note(f"The checkpoint before this one failed: {error} Training goes on.")
    try:
        run.writer.save(
            run.progress.step,
            run.model.owned(state.pieces(run.model, run.optimizer)),
            state.facts(run.config, run.inputs, run.model, run.optimizer, run.progress),
            {"tokenizer.json": run.inputs.tokenizer.to_bytes()},
        )
    except (StorageError, OutputError) as error:
        run.view.note(f"The checkpoint of step {run.progress.step} failed: {error} Training goes on.")
    return run.progress.step


def _report_save(run: Run) -> None:
    """A row for the newest finished checkpoint, once."""
    last = run.writer.last
    if last is None or last.step == run.reported_save:
        return
    run.reported_save = last.step
    values = {"saved_step": last.step, "bytes": last.num_bytes, "write_s": last.write_s, "stall_s": last.stall_s}
    values["bytes_per_s"] = last.bytes_per_s
    _record(run, "save", values)
    run.view.note(
        f"saved step {last.step}: {format_bytes(last.num_bytes)} in {format_seconds(last.write_s)} "
        f"({format_bytes(last.bytes_per_s)}/s), "
        f"training stood still for {last.stall_s * 1000:.0f} ms"
    )


def _report_step(run: Run, batches: StepBatches, result: StepResult, lr: float, elapsed_s: float) -> None:
    rates, progress = run.throughput.rates(run.config.total_steps), run.progress
    row = _record(
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


def _terms(result: StepResult) -> dict[str, float]:
    """A loss of one term says nothing more by its parts."""
    return {f"loss/{term}": mean for term, mean in result.terms.items() if len(result.terms) > 1}


_QUALITY = ("ppl", "accuracy")
_MOST_NATS = 700.0  # because: the exponential of more is no double
_TAGS = {
    "loss/train": "loss", "optim/lr": "lr", "optim/grad_norm": "grad_norm", "speed/tokens_per_s": "tokens_per_s",
    "speed/mfu": "mfu", "speed/data_wait_s": "data_wait_s", "memory/bytes": "memory_bytes",
}  # fmt: skip


def samples_hash(sample_ids: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    """A short name for exactly these samples in this order, so that two runs' data can be compared row by row."""
    return hashlib.sha256(sample_ids.astype("<i8").tobytes()).hexdigest()[:16]


def _record(run: Run, event: str, values: dict[str, Any]) -> dict[str, Any]:
    row = {"event": event, "step": run.progress.step, "attempt": run.progress.attempt} | values
    if run.metrics is not None:
        run.metrics.append(row)
    return row
