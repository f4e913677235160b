"""What a run measures besides its steps, where it is due and there is time: validation, then evaluations.

Called by the loop, on every process. What a stop cuts off is owed: the checkpoint says so, and the next start measures
it before its first step, so that no row is missing in the end. Where the time that is left is too short, the run stops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from lmtrain.batch import Batch
from lmtrain.data.dataset import Dataset, labels_of_terms
from lmtrain.observe.measure import phases
from lmtrain.observe.measure.named_measures import validation_terms
from lmtrain.parallel.model import ParallelModel
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.train.costs import EVALUATION, VALIDATION
from lmtrain.train.in_loop.requests import CutOff, Requests
from lmtrain.train.record.records import record, report_measures
from lmtrain.train.state import Run

_MOST_NATS = 700.0  # because: the exponential of more does not fit a double
Sums = list[list[float]]  # of each term the losses of its labels, and how many of these were hit


class Evaluation(Protocol):
    def __call__(
        self, model: ParallelModel, before_each: Callable[[], None], doing: Callable[[str], None]
    ) -> Iterator[dict[str, Any]]:
        """Yield a row for each task: its `name`, its `measures`, the `headline` among them, and what they are of.

        `before_each` is called before every verb of the model, on all processes alike; what it raises ends it all.
        """


def evaluate(run: Run, evaluation: Evaluation, requests: Requests) -> bool:
    """Run an evaluation; return whether it finished, equal on every process."""
    # because: blocks that are compiled for a step's shape would be compiled again for every length of a text
    uncompiled = torch.compiler.set_stance("force_eager") if run.model.compiled else nullcontext()
    try:
        with phases.within("evaluation"), uncompiled:
            for found in evaluation(run.model, requests.look, run.view.doing):
                row = record(run, "eval", found)
                run.view.evaluated(row)
                report_measures(run, row)
    except CutOff:
        return False
    return True


def validate(run: Run, requests: Requests) -> float | None:
    """Mean loss over the first `valid_samples` samples of what there is to validate on: the same ones every time.

    Of several domains each is read so, and the loss is that of all their tokens together. None where a stop cut it off.
    """
    terms = run.model.terms
    began = time.monotonic()
    try:
        with phases.within("validation"):
            taken = {name: _measure(run, name, dataset, requests) for name, dataset in run.inputs.data.valid.items()}
    except CutOff:
        return None
    sums = np.sum([sums for sums, _, _ in taken.values()], axis=0).tolist()
    counts = np.sum([counts for _, counts, _ in taken.values()], axis=0).tolist()
    values = _values(terms, sums, counts, sum(samples for _, _, samples in taken.values()))
    if run.config.data.valid_paths:
        values["domains"] = {name: _values(terms, *one) for name, one in taken.items()}
    row = record(run, "valid", values | {"seconds": time.monotonic() - began})
    run.view.valid(row)
    report_measures(run, row)
    return float(row["loss"])


def _measure(run: Run, name: str, valid: Dataset, requests: Requests) -> tuple[Sums, Sequence[int], int]:
    """Return the sums over a validation set, the labels of each term, and the number of samples."""
    dp = run.mesh.dp
    ids = np.arange(min(run.config.train.valid_samples, valid.num_samples))
    run.view.doing(f"validating on {len(ids)} samples" + (f" of {name}" if name else ""))
    batches = valid_batches(valid, ids, run.config.train.micro_batch, dp.index, dp.size)
    shares = list(run.model.valid_sums(requests.until_stop(batches)))
    sums: Sums = torch.stack(shares).sum(0).tolist()  # sync: validation ends
    return sums, labels_of_terms(valid.counts(ids).labels, len(ids), valid.batch(ids[:1])), len(ids)


def _values(terms: Sequence[str], sums: Sums, counts: Sequence[int], num_samples: int) -> dict[str, Any]:
    """Return the measures of a validation: the loss is the sum of the terms' means; perplexity is of tokens."""
    means, hits = ([one / num for one, num in zip(row, counts, strict=True)] for row in sums)
    values = {"loss": math.fsum(means), "ppl": math.exp(min(means[0], _MOST_NATS)), "accuracy": hits[0]}
    values |= {"samples": num_samples, "tokens": counts[0]}
    return values | dict(zip(validation_terms(terms), (means if len(means) > 1 else []) + hits[1:], strict=True))


def valid_batches(
    valid: Dataset, ids: np.ndarray[Any, np.dtype[np.int64]], size: int, dp_index: int, dp_size: int
) -> Iterator[Batch]:
    """Yield every dp_size-th batch, equally many on each rank; a missing one is replaced by one without labels."""
    starts = range(0, len(ids), size)
    for first in starts[::dp_size]:
        fault_point("valid.batch")
        mine = first + dp_index * size
        if mine in starts:
            yield valid.batch(ids[mine : mine + size]).map(torch.from_numpy)
        else:
            yield valid.batch(ids[first : first + size]).unlabelled().map(torch.from_numpy)


def is_due(step: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and step % interval == 0


def due(run: Run, evaluation: Evaluation | None) -> list[str]:
    """Return which measurements are due at the step that the run has reached."""
    config, step = run.config, run.progress.step
    last = step == config.total_steps
    validates = is_due(step, config.train.valid_interval_steps) or (last and bool(run.inputs.data.valid))
    evaluates = evaluation is not None and (is_due(step, config.eval.interval_steps) or last)
    return [VALIDATION] * validates + [EVALUATION] * evaluates


def measure(run: Run, requests: Requests, evaluation: Evaluation | None, names: Sequence[str]) -> float | None:
    """Run the named measurements in turn; return the validation loss if there was one and it finished."""
    loss, owed = None, []
    for name in names:
        if requests.stop_without_time_for(name):
            owed.append(name)
            continue
        with run.costs.measuring(name) as cost:
            if name == VALIDATION:
                cost.counts = (loss := validate(run, requests)) is not None
            elif evaluation is not None:
                cost.counts = evaluate(run, evaluation, requests)
        owed += [name] * (not cost.counts)
    run.progress.owed = tuple(owed)
    if owed:
        run.view.note(f"{' and '.join(owed)} of step {run.progress.step}: left to the next start, since this one ends")
    return loss


def measure_what_is_owed(run: Run, requests: Requests, evaluation: Evaluation | None) -> float | None:
    """Run the measurements that the attempt before had no time for, unless this one has no time either."""
    requests.ask()
    requests.answer()
    there = {VALIDATION: bool(run.inputs.data.valid), EVALUATION: evaluation is not None}
    names = [name for name in run.progress.owed if there.get(name)]
    for name in [name for name in names if requests.has_no_time_for(name)]:
        names.remove(name)
        run.view.note(f"warning: {name} of step {run.progress.step} is left out; it takes longer than this run may")
    return measure(run, requests, evaluation, names)
