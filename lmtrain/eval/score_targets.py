"""Scoring for all evaluations: the negative log-likelihood of each target, and whether the target was the argmax.

Called by the runner with requests from a task. Works with any model that scores batches, on any number of ranks; knows
no texts or protocols. Imports no task, so that a model is loaded quickly.

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
from lmtrain.errors import NonFiniteLossError, OutOfMemoryError, way
from lmtrain.eval.windows import MaskedRequest, Request
from lmtrain.placement.parallel_settings import ONE_PROCESS
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

LOOK_AHEAD = 16  # batches sorted by length together, so that short requests are not padded to long ones
MAX_SHARED_TARGETS = 10_000_000  # targets remembered; because: these take 90 MB
MAX_PADDING = 0.05  # fraction of the tokens fed
# because: a block mask doubles the cost of attention, and this many tokens keep most devices busy without packing
MIN_PACKED_TOKENS = 2048


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
        """Yield a tensor per batch, [2, labels], in float64 on the host. Its columns are the labels that are not
        IGNORED, row by row.

        The first row is the negative log-likelihood in nats, the second 1 where the label is the most likely token (of
        equally likely ones the first) and 0 elsewhere.
        """

    def check_same_texts(self, checksum: int) -> None:
        """Raise on every rank if any rank passes a different checksum."""

    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """Return the logits at the positions that are True in `keep_BT`, [kept, V], or without it at all positions, [B,
        T, V]. Columns that are no tokens, if there are any, are -inf.
        """


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model under evaluation with its properties."""

    model: Scorable
    tokenizer: Tokenizer
    seq_len: int
    vocab_size: int
    dtype: str
    layout: str = ONE_PROCESS
    causal: bool = True  # False: predicts masked tokens from both sides
    pairs: bool = False  # can classify whether one segment follows another


@dataclass(frozen=True)
class TargetScores:
    """The answer to a request: a value for each of its scored targets, in order."""

    nll: NDArray[np.float64]  # nats
    greedy: NDArray[np.bool_]  # True where the target was the most likely token


class AnswerCache(Protocol):
    """Store of earlier answers to batches of requests: a journal on disk. All ranks must have the same answers."""

    def find(self, requests: Sequence[Request]) -> list[TargetScores] | None: ...

    def add(self, requests: Sequence[Request], answers: Sequence[TargetScores]) -> None: ...


class Scorer:
    """Scorer of requests. Collective: all ranks score the same requests, and get all answers."""

    def __init__(
        self,
        model: Scorable,
        *,
        batch_size: int,
        report: Callable[[int, int], None] | None = None,
        cache: AnswerCache | None = None,
    ) -> None:
        """Create a scorer; `report` is called after every batch with (tokens fed, tokens whose answers were cached)."""
        self.model, self.batch_size = model, batch_size
        self._report, self._cache = report, cache
        self._can_pack = model.separates_documents
        self.num_fed = self.num_cached = 0
        self.num_padding = 0  # padding tokens in all batches

    @property
    def padding_share(self) -> float:
        return self.num_padding / max(self.num_padding + self.num_fed + self.num_cached, 1)

    def score(self, requests: Iterable[Request]) -> Iterator[TargetScores]:
        """Yield the answer to each request (a sequence of tokens to score): the losses of its targets, in the order of
        `requests`. Only a few batches of requests are read ahead.
        """
        stream, ahead = iter(requests), max(LOOK_AHEAD, self.model.scored_at_once)
        while chunk := list(islice(stream, self.batch_size * ahead)):
            self.model.check_same_texts(_checksum(chunk))
            answers: dict[int, TargetScores] = {}
            index_batches = list(batch_indices(chunk, self.batch_size, packs=self._can_pack))
            request_lists = [[chunk[row] for row in rows] for rows in index_batches]
            self.num_padding += sum(num_padding(batch, packs=self._can_pack) for batch in request_lists)
            for rows, batch_answers in zip(index_batches, self._batch_answers(request_lists), strict=True):
                answers.update(zip(rows, batch_answers, strict=True))
            yield from (answers[row] for row in range(len(chunk)))
        self.model.check_same_texts(_checksum([]))

    def _batch_answers(self, batches: Sequence[list[Request]]) -> Iterator[list[TargetScores]]:
        """Yield the answers to each batch: from the cache for the first batches, as long as it has them, then from the
        model. Answers of the model are added to the cache.

        Cached answers come first, because the journal records them in the order in which batches are scored.
        """
        first = 0
        while (
            first < len(batches)
            and self._cache is not None
            and (answers := self._cache.find(batches[first])) is not None
        ):
            self.num_cached += _num_fed(batches[first])
            yield self._report_progress(answers)
            first += 1
        for requests, answers in zip(batches[first:], self._score_batches(batches[first:]), strict=True):
            self.num_fed += _num_fed(requests)
            if self._cache is not None:
                self._cache.add(requests, answers)
            yield self._report_progress(answers)

    def _report_progress(self, answers: list[TargetScores]) -> list[TargetScores]:
        if self._report is not None:
            self._report(self.num_fed, self.num_cached)
        return answers

    def _score_batches(self, batches: Sequence[list[Request]]) -> Iterator[list[TargetScores]]:
        """Yield the answers to each batch, computed by the model. Raise OutOfMemoryError if the device runs out of
        memory.
        """
        scores = self.model.scores(_build_batch(requests, packs=self._can_pack) for requests in batches)
        try:
            for requests, scores_of_batch in zip(batches, scores, strict=True):
                yield self._split_scores(requests, *scores_of_batch.numpy())
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{self.model.device} ran out of memory when it scored {self.batch_size} x "
                f"{batches[0][0].num_fed} tokens. Give a batch size below {self.batch_size}."
            ) from error

    def _split_scores(
        self, requests: list[Request], nll: NDArray[np.float64], best: NDArray[np.float64]
    ) -> list[TargetScores]:
        """Split the scores of a batch into one answer per request. `nll` has the loss of each target of the batch, and
        `best` is 1 where the target was the most likely token. Raise NonFiniteLossError if a loss is not finite.
        """
        if not np.isfinite(nll).all():
            raise NonFiniteLossError(
                f"{np.count_nonzero(~np.isfinite(nll))} of {len(nll)} targets have a log-likelihood that is not "
                f"finite. The weights are damaged or --precision is too narrow: try {way('--precision', 'fp32')}."
            )
        ends = np.cumsum([request.num_scored for request in requests])[:-1]
        return [TargetScores(n, g) for n, g in zip(np.split(nll, ends), np.split(best > 0, ends), strict=True)]


def _checksum(requests: Sequence[Request]) -> int:
    """Return a checksum of the tokens in `requests`, by which ranks check that all of them score the same requests."""
    checksum = 0
    for request in requests:
        checksum = crc32(request.key, crc32(request.num_scored.to_bytes(8, "little"), checksum))
    return checksum


def _build_batch(requests: list[Request], *, packs: bool) -> Batch:
    fault_point("eval.batch")
    return collate(requests, packs=packs).map(torch.from_numpy)


def _num_fed(requests: Sequence[Request]) -> int:
    return sum(request.num_fed for request in requests)


class SharedAnswers:
    """Answers to the requests that several tasks share, so that a model is fed each only once. Create one per model."""

    def __init__(self) -> None:
        self._earlier: dict[bytes, TargetScores] = {}
        self._num_targets = 0

    def new(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests that no earlier task has had scored."""
        return (request for request in requests if self._find(request) is None)

    def score(
        self, requests: Iterable[Request], score: Callable[[Iterable[Request]], Iterable[TargetScores]]
    ) -> Iterator[TargetScores]:
        """Yield the answer to each request in order: the stored answer if an earlier task had the same request, else
        the answer that `score` computes. `score` is called once, with all requests that are new. `requests` is iterated
        twice.
        """
        scored = iter(score(self.new(requests)))
        new_answers: list[tuple[bytes, TargetScores]] = []
        for request in requests:
            answer = self._find(request)
            if answer is None:
                answer = next(scored)
                if self._num_targets < MAX_SHARED_TARGETS:
                    self._num_targets += len(answer.nll)
                    new_answers.append((_request_key(request), answer))
            yield answer
        self._earlier.update(new_answers)  # not before, because `new` is still iterating

    def _find(self, request: Request) -> TargetScores | None:
        answer = self._earlier.get(_request_key(request)) if self._earlier else None
        if answer is None or len(answer.nll) < request.num_scored:
            return None
        start = len(answer.nll) - request.num_scored
        return TargetScores(answer.nll[start:], answer.greedy[start:])


def _request_key(request: Request) -> bytes:
    """Return a hash by which requests for the same answer are found."""
    return blake2b(request.key, digest_size=16).digest()


def batch_indices(requests: Sequence[Request], batch_size: int, *, packs: bool) -> Iterator[list[int]]:
    """Yield batches of requests (sequences of tokens to score) of similar length, each as a list of indices into
    `requests`, in the order in which `collate` fills the rows. With `packs`, a row of a batch may hold several
    requests.

    A batch has at most as many tokens as `batch_size` of the longest requests.
    """
    lengths = [request.num_fed for request in requests]
    remaining = sorted(range(len(requests)), key=lambda index: -lengths[index])
    most_tokens = batch_size * lengths[remaining[0]] if remaining else 0
    while remaining:
        most_rows = most_tokens // lengths[remaining[0]]
        batch = _similar_lengths(remaining[:most_rows], lengths)
        if packs and len(batch) < min(most_rows, len(remaining)) and len(batch) * lengths[batch[0]] < MIN_PACKED_TOKENS:
            batch = _packed_rows(remaining, lengths, most_rows)
        yield batch
        taken = set(batch)
        remaining = [index for index in remaining if index not in taken]


def collate(requests: list[Request], *, packs: bool) -> Batch:
    """Return the requests as a padded batch of numpy arrays, as wide as the longest request. Each row has one request,
    or with `packs` as many consecutive requests as fit.

    Labels are in the requests' order, and IGNORED where nothing is scored.
    """
    if isinstance(requests[0], MaskedRequest):
        return collate_masked(requests)
    rows, width = _row_layout(requests, packs=packs)
    shape = len(rows), width
    tokens_BT, labels_BT = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    positions_BT, documents_BT = np.zeros(shape, np.int64), np.full(shape, -1, np.int32)
    for row, row_requests in enumerate(rows):
        stop = 0
        for number, request in enumerate(row_requests):
            start, stop = stop, stop + request.num_fed
            tokens_BT[row, start:stop] = request.tokens[:-1]
            labels_BT[row, stop - request.num_scored : stop] = request.tokens[-request.num_scored :]
            positions_BT[row, start:stop] = np.arange(stop - start)
            documents_BT[row, start:stop] = number
    batch = Batch(tokens_BT=tokens_BT, labels_BT=labels_BT, is_query_BT=labels_BT != IGNORED)
    if len(rows) == len(requests):
        # because: the angles of longrope depend on the length of a text, which is not that of a padded row
        is_padded = documents_BT < 0
        return replace(batch, not_padding_BT=~is_padded) if is_padded.any() else batch
    return replace(batch, positions_BT=positions_BT, documents_BT=documents_BT)


def collate_masked(requests: Sequence[Request]) -> Batch:
    """Return requests for a masked model as a batch of numpy arrays, one request per row, padded on the right. Labels
    are IGNORED where nothing is predicted.
    """
    masked = cast(Sequence[MaskedRequest], requests)
    shape = len(masked), max(request.num_fed for request in masked)
    tokens_BT, segments_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels_BT, not_padding_BT = np.full(shape, IGNORED, np.int64), np.zeros(shape, np.bool_)
    for row, request in enumerate(masked):
        length = request.num_fed
        tokens_BT[row, :length] = request.tokens[:length]
        not_padding_BT[row, :length] = True
        if request.segments is not None:
            segments_BT[row, :length] = request.segments
        if request.places is not None:
            labels_BT[row, request.places] = request.tokens[-request.num_scored :]
    pairs = masked[0].places is None
    is_query_BT = labels_BT != IGNORED
    is_query_BT[:, 0] |= pairs  # because: the pair head reads the first token
    return Batch(
        tokens_BT=tokens_BT,
        labels_BT=labels_BT,
        segments_BT=segments_BT,
        not_padding_BT=not_padding_BT,
        is_query_BT=is_query_BT,
        pair_labels_B=np.array([request.tokens[-1] for request in masked], np.int64) if pairs else None,
    )


def num_padding(requests: list[Request], *, packs: bool) -> int:
    """Return the number of padding tokens in the requests' batch."""
    rows, width = _row_layout(requests, packs=packs)
    return len(rows) * width - _num_fed(requests)


def _row_layout(requests: list[Request], *, packs: bool) -> tuple[list[list[Request]], int]:
    """Return the requests of each row of a batch, and the width of the rows in tokens. With `packs` a request shares
    the row of the previous request if it fits; otherwise each has a row of its own.
    """
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


def _similar_lengths(ordered: list[int], lengths: list[int]) -> list[int]:
    """Return the requests of a batch with one request per row: as many of the first in `ordered` as keep the padding
    small. `ordered` has indices of requests, the longest first; `lengths` has the lengths of all requests in tokens.
    """
    widths = np.array([lengths[index] for index in ordered])
    fed = widths[0] * np.arange(1, len(ordered) + 1)
    fits = fed - np.cumsum(widths) <= MAX_PADDING * fed
    return ordered[: int(fits.nonzero()[0][-1]) + 1]


def _packed_rows(ordered: list[int], lengths: list[int], most_rows: int) -> list[int]:
    """Return the indices of the requests of a packed batch, row by row: it has at most `most_rows` rows, each as wide
    as the longest request and filled with as many as fit. `ordered` has indices of requests, the longest first;
    `lengths` has the lengths of all requests in tokens.

    Each request goes into the row where it leaves the least space. Rows that would need much padding are left out.
    """
    width = lengths[ordered[0]]
    rows: list[list[int]] = []
    room: list[int] = []
    for index in ordered:
        fits = [row for row, space in enumerate(room) if lengths[index] <= space]
        if fits:
            row = min(fits, key=room.__getitem__)
        elif len(rows) < most_rows:
            row = len(rows)
            rows.append([])
            room.append(width)
        else:
            continue
        rows[row].append(index)
        room[row] -= lengths[index]
    fullest = sorted(range(len(rows)), key=room.__getitem__)
    fits_in = np.cumsum([room[row] for row in fullest]) <= MAX_PADDING * width * np.arange(1, len(rows) + 1)
    return [index for row in fullest[: int(fits_in.nonzero()[0][-1]) + 1] for index in rows[row]]
