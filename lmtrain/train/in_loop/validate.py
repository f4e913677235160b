"""Validation: the same samples every time, shared among the copies of the model, and their row of metrics.

Called by the loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lmtrain.batch import Batch
from lmtrain.data.dataset import Dataset, labels_of_terms
from lmtrain.observe.measure import phases
from lmtrain.observe.measure.measures import validation_terms
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.train.in_loop.requests import CutOff, Requests
from lmtrain.train.record.records import record, report_measures
from lmtrain.train.run import Run

_MOST_NATS = 700.0  # because: the exponential of more does not fit a double
Sums = list[list[float]]  # of each term the losses of its labels, and how many of these were hit


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
    """Sums over these samples, over how many labels of each term, and how many samples."""
    dp = run.mesh.dp
    ids = np.arange(min(run.config.train.valid_samples, valid.num_samples))
    run.view.doing(f"validating on {len(ids)} samples" + (f" of {name}" if name else ""))
    batches = valid_batches(valid, ids, run.config.train.micro_batch, dp.index, dp.size)
    shares = list(run.model.valid_sums(requests.until_stop(batches)))
    sums: Sums = torch.stack(shares).sum(0).tolist()  # sync: validation ends
    return sums, labels_of_terms(valid.counts(ids).labels, len(ids), valid.batch(ids[:1])), len(ids)


def _values(terms: Sequence[str], sums: Sums, counts: Sequence[int], num_samples: int) -> dict[str, Any]:
    """Of several terms the loss is the sum of their means; perplexity and accuracy are the first's, that of tokens."""
    means, hits = ([one / num for one, num in zip(row, counts, strict=True)] for row in sums)
    values = {"loss": math.fsum(means), "ppl": math.exp(min(means[0], _MOST_NATS)), "accuracy": hits[0]}
    values |= {"samples": num_samples, "tokens": counts[0]}
    return values | dict(zip(validation_terms(terms), (means if len(means) > 1 else []) + hits[1:], strict=True))


def valid_batches(
    valid: Dataset, ids: np.ndarray[Any, np.dtype[np.int64]], size: int, dp_index: int, dp_size: int
) -> Iterator[Batch]:
    """Every dp_size-th batch. Each rank has equally many, as they compute together: one too few ends with no labels."""
    starts = range(0, len(ids), size)
    for first in starts[::dp_size]:
        fault_point("valid.batch")
        mine = first + dp_index * size
        if mine in starts:
            yield valid.batch(ids[mine : mine + size]).map(torch.from_numpy)
        else:
            yield valid.batch(ids[first : first + size]).unlabelled().map(torch.from_numpy)
