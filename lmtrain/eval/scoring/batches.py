"""Which requests are fed together, and as what. Pure numpy, no torch. Called by scoring.

Requests of like length lie a row each, padded on the right, where a causal model cannot see the padding. Where that
would pad too much, short ones lie behind one another in a row, as documents that do not see each other. Padding is
never more than a twentieth of what is fed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from lmtrain.batch import IGNORED, Batch
from lmtrain.eval.windows import MaskedRequest, Request

MOST_PADDING = 0.05  # of the tokens fed
# because: a block mask doubles what attention costs, and a batch of so many tokens keeps most devices busy without it
ENOUGH_TOKENS = 2048

def batches(requests: Sequence[Request], batch_size: int, *, packs: bool) -> Iterator[list[int]]:
    """Each request once: in a batch no more tokens than batch_size of the longest have. The order within it is the one
    that `collate` needs. `packs`: the model keeps documents of a row apart."""
    lengths = [request.num_fed for request in requests]
    left = sorted(range(len(requests)), key=lambda one: -lengths[one])
    most_tokens = batch_size * lengths[left[0]] if left else 0
    while left:
        most_rows = most_tokens // lengths[left[0]]
        batch = _like(left[:most_rows], lengths)
        if packs and len(batch) < min(most_rows, len(left)) and len(batch) * lengths[batch[0]] < ENOUGH_TOKENS:
            batch = _filled(left, lengths, most_rows)
        yield batch
        taken = set(batch)
        left = [one for one in left if one not in taken]


def collate(requests: list[Request], *, packs: bool) -> Batch:
    """Rows as wide as the longest; with `packs` a request lies behind the one before it where it fits. Labels are in
    the requests' order, and IGNORED wherever nothing is scored."""
    if isinstance(requests[0], MaskedRequest):
        return collate_masked(requests)
    rows, width = _laid_out(requests, packs=packs)
    shape = len(rows), width
    tokens_BT, labels_BT = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    positions_BT, documents_BT = np.zeros(shape, np.int64), np.full(shape, -1, np.int32)
    for row, some in enumerate(rows):
        stop = 0
        for number, request in enumerate(some):
            start, stop = stop, stop + request.num_fed
            tokens_BT[row, start:stop] = request.tokens[:-1]
            labels_BT[row, stop - request.num_scored : stop] = request.tokens[-request.num_scored :]
            positions_BT[row, start:stop] = np.arange(stop - start)
            documents_BT[row, start:stop] = number
    batch = Batch(tokens_BT=tokens_BT, labels_BT=labels_BT, asked_BT=labels_BT != IGNORED)
    if len(rows) == len(requests):
        return batch
    return replace(batch, positions_BT=positions_BT, documents_BT=documents_BT)


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


def num_padding(requests: list[Request], *, packs: bool) -> int:
    """Tokens of their batch that are nobody's."""
    rows, width = _laid_out(requests, packs=packs)
    return len(rows) * width - sum(request.num_fed for request in requests)


def _laid_out(requests: list[Request], *, packs: bool) -> tuple[list[list[Request]], int]:
    """What each row holds, and how wide it is."""
    width = max(request.num_fed for request in requests)
    rows: list[list[Request]] = []
    room = 0
    for request in requests:
        if not packs or not rows or request.num_fed > room:
            rows.append([])
            room = width
        rows[-1].append(request)
        room -= request.num_fed
    return rows, width


def _like(some: list[int], lengths: list[int]) -> list[int]:
    """As many of the longest as go with little padding, a row each."""
    widths = np.array([lengths[one] for one in some])
    fed = widths[0] * np.arange(1, len(some) + 1)
    fits = fed - np.cumsum(widths) <= MOST_PADDING * fed
    return some[: int(fits.nonzero()[0][-1]) + 1]


def _filled(some: list[int], lengths: list[int], most_rows: int) -> list[int]:
    """Rows as long as the longest, filled up with shorter ones: each goes where it leaves the least room."""
    width = lengths[some[0]]
    rows: list[list[int]] = []
    room: list[int] = []
    for one in some:
        fits = [row for row, free in enumerate(room) if lengths[one] <= free]
        if fits:
            row = min(fits, key=room.__getitem__)
        elif len(rows) < most_rows:
            row = len(rows)
            rows.append([])
            room.append(width)
        else:
            continue
        rows[row].append(one)
        room[row] -= lengths[one]
    fullest = sorted(range(len(rows)), key=room.__getitem__)
    unused = np.cumsum([room[row] for row in fullest])
    fits_in = unused <= MOST_PADDING * width * np.arange(1, len(rows) + 1)
    return [one for row in fullest[: int(fits_in.nonzero()[0][-1]) + 1] for one in rows[row]]
