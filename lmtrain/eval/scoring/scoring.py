"""The engine of every evaluation: the negative log-likelihood of each asked-for target, and whether it was the argmax.

Called by the runner with requests from a task. Works on anything that scores batches, on however many processes; knows
no text, no tokenizer and no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Protocol
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.errors import NonFiniteLossError, OutOfMemoryError
from lmtrain.eval.scoring.batches import batches, collate, num_padding
from lmtrain.eval.windows import Request
from lmtrain.runtime.processes.faults import fault_point

LOOK_AHEAD = 16  # batches sorted by length together, so that short requests do not pay for long ones
MOST_TARGETS = 10_000_000  # that are remembered; because: they take 90 MB


class Scorable(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def scored_at_once(self) -> int:
        """Batches that `scores` takes together."""

    @property
    def separates_documents(self) -> bool:
        """Whether requests may share a row."""

    def scores(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Of each batch [2, labels] in float64, on the host: of labels that are not IGNORED, row by row, the negative
        log-likelihood, and 1 where the label is the most likely token, of several that score alike the first.
        """

    def check_alike(self, checksum: int) -> None:
        """All processes of an evaluation have the same one, or all of them raise."""

    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """[kept, V] over the vocabulary; columns that are not tokens, where there are any, are -inf."""


@dataclass(frozen=True)
class Scored:
    """One request's answer: a number for each of its scored targets, in order."""

    nll: NDArray[np.float64]  # nats
    greedy: NDArray[np.bool_]  # the target was the most likely token


class Known(Protocol):
    """What remembers the answers to batches of requests: a journal on disk. All processes have the same."""

    def find(self, requests: Sequence[Request]) -> list[Scored] | None: ...

    def add(self, requests: Sequence[Request], answers: Sequence[Scored]) -> None: ...


class Scorer:
    """All processes of an evaluation ask for the same, and get all answers."""

    def __init__(
        self,
        model: Scorable,
        *,
        batch_size: int,
        report: Callable[[int, int], None] | None = None,
        known: Known | None = None,
    ) -> None:
        """`report` is told, after every batch, how many tokens have been fed and how many more were known already."""
        self.model, self.batch_size = model, batch_size
        self._report, self._known = report, known
        self._packs = model.separates_documents
        self.num_fed = self.num_known = 0
        self.num_padding = 0  # tokens of all batches that are nobody's

    @property
    def padding_share(self) -> float:
        num_tokens = self.num_fed + self.num_known
        return self.num_padding / max(self.num_padding + num_tokens, 1)

    def score(self, requests: Iterable[Request]) -> Iterator[Scored]:
        """Answers in the order of the requests, which are read only a little ahead."""
        stream, ahead = iter(requests), max(LOOK_AHEAD, self.model.scored_at_once)
        while chunk := list(islice(stream, self.batch_size * ahead)):
            self.model.check_alike(_checksum(chunk))
            answers: dict[int, Scored] = {}
            together = list(batches(chunk, self.batch_size, packs=self._packs))
            asked = [[chunk[row] for row in rows] for rows in together]
            self.num_padding += sum(num_padding(some, packs=self._packs) for some in asked)
            scored = self._answers(asked)
            for rows, found in zip(together, scored, strict=True):
                answers.update(zip(rows, found, strict=True))
            yield from (answers[row] for row in range(len(chunk)))
        self.model.check_alike(_checksum([]))

    def _answers(self, asked: Sequence[list[Request]]) -> Iterator[list[Scored]]:
        """Those that are known come first: answers are remembered in the order in which they are asked for."""
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
        """The answers to each batch, as they come."""
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
    """Answers to what several tasks ask of a model alike, so that it is fed once. One for each model."""

    def __init__(self) -> None:
        self.num_shared = 0  # requests answered without the model
        self._earlier: dict[bytes, Scored] = {}
        self._num_targets = 0

    def new(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Those that no earlier task has had scored."""
        return (request for request in requests if self._find(request) is None)

    def score(
        self, requests: Iterable[Request], score: Callable[[Iterable[Request]], Iterable[Scored]]
    ) -> Iterator[Scored]:
        """Answers in the order of the requests, which are walked twice; the new ones are what `score` is given."""
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
        self._earlier.update(found)  # not before: `new` is still walking

    def _find(self, request: Request) -> Scored | None:
        found = self._earlier.get(_key(request)) if self._earlier else None
        if found is None or len(found.nll) < request.num_scored:
            return None
        start = len(found.nll) - request.num_scored
        return Scored(found.nll[start:], found.greedy[start:])


def _key(request: Request) -> bytes:
    return blake2b(request.key, digest_size=16).digest()
