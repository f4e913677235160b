"""The engine of every evaluation: the negative log-likelihood of each asked-for target, and whether it was the argmax.

Called by the runner with requests from a task. Works on anything that scores batches, on however many processes; knows
no text, no tokenizer and no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.errors import NonFiniteLossError, OutOfMemoryError
from lmtrain.eval.batches import batches, collate
from lmtrain.eval.windows import Request

LOOK_AHEAD = 16  # batches sorted by length together, so that short requests do not pay for long ones


class Scorable(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def scored_at_once(self) -> int:
        """Batches that `scores` takes together."""

    def scores(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Of each batch [2, labels] in float64, on the host: of labels that are not IGNORED, row by row, the negative
        log-likelihood, and 1 where the label is the most likely token, of several that score alike the first.
        """

    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """[kept, V] over the vocabulary; columns that are not tokens, where there are any, are -inf."""


@dataclass(frozen=True)
class Scored:
    """One request's answer: a number for each of its scored targets, in order."""

    nll: NDArray[np.float64]  # nats
    greedy: NDArray[np.bool_]  # the target was the most likely token


class Scorer:
    """All processes of an evaluation ask for the same, and get all answers."""

    def __init__(self, model: Scorable, *, batch_size: int, report: Callable[[int], None] | None = None) -> None:
        """`report` is told how many targets have been scored, after every batch: answers come many batches later."""
        self.model, self.batch_size = model, batch_size
        self._report, self._done = report, 0

    def score(self, requests: Iterable[Request]) -> Iterator[Scored]:
        """Answers in the order of the requests, which are read only a little ahead."""
        stream, ahead = iter(requests), max(LOOK_AHEAD, self.model.scored_at_once)
        while chunk := list(islice(stream, self.batch_size * ahead)):
            answers: dict[int, Scored] = {}
            together = list(batches(chunk, self.batch_size))
            scored = self._batches([[chunk[row] for row in rows] for rows in together])
            for rows, found in zip(together, scored, strict=True):
                answers.update(zip(rows, found, strict=True))
            yield from (answers[row] for row in range(len(chunk)))

    def _batches(self, asked: Sequence[list[Request]]) -> Iterator[list[Scored]]:
        """The answers to each batch, as they come."""
        scores = self.model.scores(collate(requests).map(torch.from_numpy) for requests in asked)
        try:
            for requests, found in zip(asked, scores, strict=True):
                yield self._scored(requests, *found.numpy())
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{self.model.device} ran out of memory scoring {self.batch_size} x {len(asked[0][0].tokens) - 1} "
                f"tokens. Use a --batch-size below {self.batch_size}."
            ) from error

    def _scored(self, requests: list[Request], nll: NDArray[np.float64], best: NDArray[np.float64]) -> list[Scored]:
        if not np.isfinite(nll).all():
            raise NonFiniteLossError(
                f"{np.count_nonzero(~np.isfinite(nll))} of {len(nll)} targets have a log-likelihood that is not "
                "finite. The weights are damaged or --precision is too narrow: try --precision fp32."
            )
        self._done += len(nll)
        if self._report is not None:
            self._report(self._done)
        ends = np.cumsum([request.num_scored for request in requests])[:-1]
        return [Scored(n, g) for n, g in zip(np.split(nll, ends), np.split(best > 0, ends), strict=True)]
