"""Requests to models that see both sides, as what is fed. Pure numpy, no torch. Called by batches.

Padding is told apart, since such a model would see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from lmtrain.batch import IGNORED, Batch
from lmtrain.eval.text.windows import MaskedRequest, Request


def collate_masked(requests: Sequence[Request]) -> Batch:
    """Numpy arrays padded on the right; labels are IGNORED wherever nothing is asked."""
    asked = cast(Sequence[MaskedRequest], requests)
    shape = len(asked), max(request.num_fed for request in asked)
    tokens_BT, segments_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels_BT, real_BT = np.full(shape, IGNORED, np.int64), np.zeros(shape, np.bool_)
    for row, request in enumerate(asked):
        length = request.num_fed
        tokens_BT[row, :length] = request.tokens[:length]
        real_BT[row, :length] = True
        if request.segments is not None:
            segments_BT[row, :length] = request.segments
        if request.places is not None:
            labels_BT[row, request.places] = request.tokens[-request.num_scored :]
    pairs = asked[0].places is None
    asked_BT = labels_BT != IGNORED
    asked_BT[:, 0] |= pairs  # because: the first token has gathered what is known of a pair
    return Batch(
        tokens_BT=tokens_BT,
        labels_BT=labels_BT,
        segments_BT=segments_BT,
        real_BT=real_BT,
        asked_BT=asked_BT,
        pair_labels_B=np.array([request.tokens[-1] for request in asked], np.int64) if pairs else None,
    )
