"""Validation: the same samples every time, shared among the copies of the model, and their row of metrics.

Called by the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lmtrain.batch import Batch
from lmtrain.data.dataset import Dataset, labels_of_terms
from lmtrain.train.records import record
from lmtrain.train.setup import Run

_QUALITY = ("ppl", "accuracy")
_MOST_NATS = 700.0  # because: the exponential of more does not fit a double


def validate(run: Run) -> float:
    """Mean loss over the first `valid_samples` samples of the validation documents: the same ones every time.

    Of several terms the loss is the sum of their means; perplexity and accuracy are the first's, that of tokens.
    """
    valid, dp, terms = run.inputs.data.valid, run.mesh.dp, run.model.terms
    assert valid is not None
    ids = np.arange(min(run.config.train.valid_samples, valid.num_samples))
    batches = valid_batches(valid, ids, run.config.train.micro_batch, dp.index, dp.size)
    sums = torch.stack(list(run.model.valid_sums(batches))).sum(0).tolist()  # sync: validation ends
    counts = labels_of_terms(valid.counts(ids).labels, len(ids), valid.batch(ids[:1]))
    means, hits = ([one / num for one, num in zip(row, counts, strict=True)] for row in sums)
    loss = math.fsum(means)
    row = {"loss": loss, "ppl": math.exp(min(means[0], _MOST_NATS)), "accuracy": hits[0]}
    row |= {"samples": len(ids), "tokens": counts[0]}
    row |= {f"loss/{term}": mean for term, mean in zip(terms, means, strict=True) if len(terms) > 1}
    row |= {f"accuracy/{term}": share for term, share in zip(terms[1:], hits[1:], strict=True)}
    run.view.valid(record(run, "valid", row))
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
