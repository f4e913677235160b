"""Which requests are fed together, and as what. Pure numpy, no torch. Called by scoring.

Rows are padded on the right, where a causal model cannot see the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lmtrain.batch import IGNORED, Batch
from lmtrain.eval.masked import alike_in_length, collate_masked
from lmtrain.eval.windows import MaskedRequest, Request


def batches(requests: Sequence[Request], batch_size: int) -> Iterator[list[int]]:
    """Rows of like length, at most batch_size together, the longest first."""
    if requests and isinstance(requests[0], MaskedRequest):
        return alike_in_length(requests, batch_size)
    rows = sorted(range(len(requests)), key=lambda row: -len(requests[row].tokens))
    return (rows[first : first + batch_size] for first in range(0, len(rows), batch_size))


def collate(requests: list[Request]) -> Batch:
    """Numpy arrays padded on the right; labels are IGNORED wherever nothing is scored."""
    if isinstance(requests[0], MaskedRequest):
        return collate_masked(requests)
    width = max(len(request.tokens) for request in requests) - 1
    tokens_BT = np.zeros((len(requests), width), np.int64)
    labels_BT = np.full((len(requests), width), IGNORED, np.int64)
    for row, request in enumerate(requests):
        stop = len(request.tokens) - 1
        tokens_BT[row, :stop] = request.tokens[:-1]
        labels_BT[row, stop - request.num_scored : stop] = request.tokens[-request.num_scored :]
    return Batch(tokens_BT=tokens_BT, labels_BT=labels_BT)
