"""Scoring for all evaluations: the negative log-likelihood of each target, and whether the target was the argmax.

Called by the runner with requests from a task. Works with any model that scores batches, on any number of ranks; knows
no texts, tokenizers or protocols.

Requests of similar length are batched one per row, padded on the right, where a causal model cannot see the padding. If
that would pad too much, short requests are packed behind one another in a row, as documents that do not see each other.
Padding is never more than a twentieth of the tokens fed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Protocol, cast
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmtrain.batch import IGNORED, Batch
from lmtrain.errors import NonFiniteLossError, OutOfMemoryError
from lmtrain.eval.windows import MaskedRequest, Request
from lmtrain.runtime.processes.faults import fault_point

LOOK_AHEAD = 16  # batches sorted by length together, so that short requests are not padded to long ones
MOST_TARGETS = 10_000_000  # targets remembered; because: these take 90 MB
MOST_PADDING = 0.05  # fraction of the tokens fed
# because: a block mask doubles the cost of attention, and this many tokens keep most devices busy without packing
ENOUGH_TOKENS = 2048


class Scorable(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def scored_at_once(self) -> int:
        """The number of batches that `scores` processes together."""

    @property
    def separates_documents(self) -> bool:
        """True if requests may share a row."""

    def scores(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Yield per batch [2, labels] in float64 on the host, for the labels that are not IGNORED, row by row.

        The first row is the negative log-likelihood in nats, the second 1 where the label is the most likely token (of
        equally likely ones the first) and 0 elsewhere.
        """

    def check_alike(self, checksum: int) -> None:
        """Raise on every rank if any rank passes a different checksum."""

    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """Return [kept, V] over the vocabulary; columns that are no tokens, if there are any, are -inf."""


@dataclass(frozen=True)
class Scored:
    """The answer to a request: a value for each of its scored targets, in order."""

    nll: NDArray[np.float64]  # nats
    greedy: NDArray[np.bool_]  # True where the target was the most likely token


class Known(Protocol):
    """Memory of the answers to batches of requests: a journal on disk. All ranks must have the same answers."""

    def find(self, requests: Sequence[Request]) -> list[Scored] | None: ...

    def add(self, requests: Sequence[Request], answers: Sequence[Scored]) -> None: ...


class Scorer:
    """Scorer of requests. Collective: all ranks score the same requests, and get all answers."""

    def __init__(
        self,
        model: Scorable,
        *,
        batch_size: int,
        report: Callable[[int, int], None] | None = None,
        known: Known | None = None,
    ) -> None:
        """Create a scorer; `report` is called after every batch with (tokens fed, tokens whose answers were known)."""
        self.model, self.batch_size = model, batch_size
        self._report, self._known = report, known
        self._packs = model.separates_documents
        self.num_fed = self.num_known = 0
        self.num_padding = 0  # padding tokens in all batches

    @property
    def padding_share(self) -> float:
        return self.num_padding / max(self.num_padding + self.num_fed + self.num_known, 1)

    def score(self, requests: Iterable[Request]) -> Iterator[Scored]:
        """Yield the answers in the order of the requests, which are read only a little ahead."""
        stream, ahead = iter(requests), max(LOOK_AHEAD, self.model.scored_at_once)
        while chunk := list(islice(stream, self.batch_size * ahead)):
            self.model.check_alike(_checksum(chunk))
            answers: dict[int, Scored] = {}
            together = list(batches(chunk, self.batch_size, packs=self._packs))
            asked = [[chunk[row] for row in rows] for rows in together]
            self.num_padding += sum(num_padding(some, packs=self._packs) for some in asked)
            for rows, found in zip(together, self._answers(asked), strict=True):
                answers.update(zip(rows, found, strict=True))
            yield from (answers[row] for row in range(len(chunk)))
        self.model.check_alike(_checksum([]))

    def _answers(self, asked: Sequence[list[Request]]) -> Iterator[list[Scored]]:
        """Yield the answers to each batch.

        Known answers come first, because the journal records them in the order in which batches are scored.
        """
        first = 0
        while first < len(asked) and self._known is not None and (found := self._known.find(asked[first])) is not None:
            self.num_known += _num_fed(asked[first])
            yield self._told(found)
            first += 1
        for requests, found in zip(asked[first:], self._batches(asked[first:]), strict=True):
            self.num_fed += _num_fed(requests)
            if self._known is not None:
                self._known.add(requests, found)
            yield self._told(found)

    def _told(self, answers: list[Scored]) -> list[Scored]:
        if self._report is not None:
            self._report(self.num_fed, self.num_known)
        return answers

    def _batches(self, asked: Sequence[list[Request]]) -> Iterator[list[Scored]]:
        """Yield the answers to each batch as the model scores it."""
        scores = self.model.scores(_fed(requests, packs=self._packs) for requests in asked)
        try:
            for requests, found in zip(asked, scores, strict=True):
                yield self._scored(requests, *found.numpy())
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{self.model.device} ran out of memory scoring {self.batch_size} x {asked[0][0].num_fed} "
                f"tokens. Use a --batch-size below {self.batch_size}."
            ) from error

    def _scored(self, requests: list[Request], nll: NDArray[np.float64], best: NDArray[np.float64]) -> list[Scored]:
        if not np.isfinite(nll).all():
            raise NonFiniteLossError(
                f"{np.count_nonzero(~np.isfinite(nll))} of {len(nll)} targets have a log-likelihood that is not "
                "finite. The weights are damaged or --precision is too narrow: try --precision fp32."
            )
        ends = np.cumsum([request.num_scored for request in requests])[:-1]
        return [Scored(n, g) for n, g in zip(np.split(nll, ends), np.split(best > 0, ends), strict=True)]


def _checksum(requests: Sequence[Request]) -> int:
    found = 0
    for request in requests:
        found = crc32(request.key, crc32(request.num_scored.to_bytes(8, "little"), found))
    return found


def _fed(requests: list[Request], *, packs: bool) -> Batch:
    fault_point("eval.batch")
    return collate(requests, packs=packs).map(torch.from_numpy)


def _num_fed(requests: Sequence[Request]) -> int:
    return sum(request.num_fed for request in requests)


class Passes:
    """Answers to the requests that several tasks share, so that a model is fed each only once. Create one per model."""

    def __init__(self) -> None:
        self.num_shared = 0  # number of requests answered without the model
        self._earlier: dict[bytes, Scored] = {}
        self._num_targets = 0

    def new(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests that no earlier task has had scored."""
        return (request for request in requests if self._find(request) is None)

    def score(
        self, requests: Iterable[Request], score: Callable[[Iterable[Request]], Iterable[Scored]]
    ) -> Iterator[Scored]:
        """Yield answers in the order of the requests, calling `score` with the new ones. Iterates requests twice."""
        scored = iter(score(self.new(requests)))
        found: list[tuple[bytes, Scored]] = []
        for request in requests:
            answer = self._find(request)
            if answer is None:
                answer = next(scored)
                if self._num_targets < MOST_TARGETS:
                    self._num_targets += len(answer.nll)
                    found.append((_key(request), answer))
            else:
                self.num_shared += 1
            yield answer
        self._earlier.update(found)  # not before, because `new` is still iterating

    def _find(self, request: Request) -> Scored | None:
        found = self._earlier.get(_key(request)) if self._earlier else None
        if found is None or len(found.nll) < request.num_scored:
            return None
        start = len(found.nll) - request.num_scored
        return Scored(found.nll[start:], found.greedy[start:])


def _key(request: Request) -> bytes:
    return blake2b(request.key, digest_size=16).digest()


def batches(requests: Sequence[Request], batch_size: int, *, packs: bool) -> Iterator[list[int]]:
    """Yield batches as lists of indices, each request once, in the order that `collate` needs.

    A batch has at most as many tokens as `batch_size` of the longest requests. `packs`: the model keeps documents of a
    row apart, so requests may share a row.
    """
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
    """Return a batch with rows as wide as the longest request.

    With `packs` a request follows the previous one in its row if it fits. Labels are in the requests' order, and
    IGNORED where nothing is scored.
    """
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
    batch = Batch(tokens_BT=tokens_BT, labels_BT=labels_BT, is_query_BT=labels_BT != IGNORED)
    if len(rows) == len(requests):
        return batch
    return replace(batch, positions_BT=positions_BT, documents_BT=documents_BT)


def collate_masked(requests: Sequence[Request]) -> Batch:
    """Return a batch of numpy arrays, padded on the right; labels are IGNORED where nothing is predicted."""
    asked = cast(Sequence[MaskedRequest], requests)
    shape = len(asked), max(request.num_fed for request in asked)
    tokens_BT, segments_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels_BT, not_padding_BT = np.full(shape, IGNORED, np.int64), np.zeros(shape, np.bool_)
    for row, request in enumerate(asked):
        length = request.num_fed
        tokens_BT[row, :length] = request.tokens[:length]
        not_padding_BT[row, :length] = True
        if request.segments is not None:
            segments_BT[row, :length] = request.segments
        if request.places is not None:
            labels_BT[row, request.places] = request.tokens[-request.num_scored :]
    pairs = asked[0].places is None
    is_query_BT = labels_BT != IGNORED
    is_query_BT[:, 0] |= pairs  # because: the pair head reads the first token
    return Batch(
        tokens_BT=tokens_BT,
        labels_BT=labels_BT,
        segments_BT=segments_BT,
        not_padding_BT=not_padding_BT,
        is_query_BT=is_query_BT,
        pair_labels_B=np.array([request.tokens[-1] for request in asked], np.int64) if pairs else None,
    )


def num_padding(requests: list[Request], *, packs: bool) -> int:
    """Return the number of padding tokens in the requests' batch."""
    rows, width = _laid_out(requests, packs=packs)
    return len(rows) * width - sum(request.num_fed for request in requests)


def _laid_out(requests: list[Request], *, packs: bool) -> tuple[list[list[Request]], int]:
    """Return the requests of each row, and the width of the rows."""
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
    """Return as many of the longest requests as fit into a batch of one request per row with little padding."""
    widths = np.array([lengths[one] for one in some])
    fed = widths[0] * np.arange(1, len(some) + 1)
    fits = fed - np.cumsum(widths) <= MOST_PADDING * fed
    return some[: int(fits.nonzero()[0][-1]) + 1]


def _filled(some: list[int], lengths: list[int], most_rows: int) -> list[int]:
    """Return requests for rows as long as the longest, each placed in the row where it leaves the least space."""
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
    fits_in = np.cumsum([room[row] for row in fullest]) <= MOST_PADDING * width * np.arange(1, len(rows) + 1)
    return [one for row in fullest[: int(fits_in.nonzero()[0][-1]) + 1] for one in rows[row]]
