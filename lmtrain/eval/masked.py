"""Requests to models that see both sides: which are fed together, and as what. Pure numpy, no torch. Called by batches.

Padding is told apart, since such a model would see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from lmtrain.batch import IGNORED, Batch
from lmtrain.eval.windows import MaskedRequest, Request

MOST_PADDING = 0.05  # of the tokens fed


def alike_in_length(requests: Sequence[Request], batch_size: int) -> Iterator[list[int]]:
    """The longest first, at most batch_size together, and no more padding than MOST_PADDING."""
    lengths = [len(request.tokens) - request.num_scored for request in requests]
    rows: list[int] = []
    fed = 0
    for row in sorted(range(len(requests)), key=lambda row: -lengths[row]):
        room = lengths[rows[0]] * (len(rows) + 1) if rows else 0
        if rows and (len(rows) == batch_size or room - fed - lengths[row] > MOST_PADDING * room):
            yield rows
            rows, fed = [], 0
        rows.append(row)
        fed += lengths[row]
    if rows:
        yield rows


def collate_masked(requests: Sequence[Request]) -> Batch:
    """Numpy arrays padded on the right; labels are IGNORED wherever nothing is asked."""
    asked = cast(Sequence[MaskedRequest], requests)
    shape = len(asked), max(len(request.fed) for request in asked)
    tokens_BT, segments_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels_BT, real_BT = np.full(shape, IGNORED, np.int64), np.zeros(shape, np.bool_)
    for row, request in enumerate(asked):
        length = len(request.fed)
        tokens_BT[row, :length] = request.fed
        real_BT[row, :length] = True
        if request.segments is not None:
            segments_BT[row, :length] = request.segments
        if request.places is not None:
            labels_BT[row, request.places] = request.tokens[-request.num_scored :]
    pairs = asked[0].places is None
    return Batch(
        tokens_BT=tokens_BT,
        labels_BT=labels_BT,
        segments_BT=segments_BT,
        real_BT=real_BT,
        pair_labels_B=np.array([request.tokens[-1] for request in asked], np.int64) if pairs else None,
    )
