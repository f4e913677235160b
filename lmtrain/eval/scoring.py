"""The engine of every evaluation: the negative log-likelihood of each asked-for target, and whether it was the argmax.

Called by the runner with requests from a task. Works on anything that offers `logits(batch, keep_BT)`; knows no text,
no tokenizer and no protocol. Only scored positions go through the head.
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

from lmtrain.batch import IGNORED, Batch
from lmtrain.errors import NonFiniteLossError, OutOfMemoryError
from lmtrain.eval.batches import batches, collate
from lmtrain.eval.windows import Request
from lmtrain.runtime.faults import fault_point

MAX_KEPT = 4096  # because: 4096 rows of fp32 logits over GPT-2's vocabulary are 0.8 GB
LOOK_AHEAD = 16  # batches sorted by length together, so that short requests do not pay for long ones
ROWS_AT_ONCE = 256  # rows whose log-sum-exp is taken in float64 at a time


class Scorable(Protocol):
    @property
    def device(self) -> torch.device: ...

    def logits(self, batch: Batch, keep_BT: Tensor | None = None) -> Tensor:
        """[kept, V] over the vocabulary; columns that are not tokens, where there are any, are -inf."""


@dataclass(frozen=True)
class Scored:
    """One request's answer: a number for each of its scored targets, in order."""

    nll: NDArray[np.float64]  # nats
    greedy: NDArray[np.bool_]  # the target was the most likely token


class Known(Protocol):
    """What remembers the answers to a batch of requests: a journal on disk."""

    def find(self, requests: Sequence[Request]) -> list[Scored] | None: ...

    def add(self, requests: Sequence[Request], answers: Sequence[Scored]) -> None: ...


class Scorer:
    def __init__(
        self,
        model: Scorable,
        *,
        batch_size: int,
        max_kept: int = MAX_KEPT,
        report: Callable[[int, int], None] | None = None,
        known: Known | None = None,
    ) -> None:
        """`report` is told, after every batch, how many tokens have been fed and how many more were known already."""
        self.model, self.batch_size, self.max_kept = model, batch_size, max_kept
        self._report, self._known = report, known
        self.num_fed = self.num_known = 0

    def score(self, requests: Iterable[Request]) -> Iterator[Scored]:
        """Answers in the order of the requests, which are read only a little ahead."""
        stream = iter(requests)
        while chunk := list(islice(stream, self.batch_size * LOOK_AHEAD)):
            answers: dict[int, Scored] = {}
            for rows in batches(chunk, self.batch_size, self.max_kept):
                answers.update(zip(rows, self._answers([chunk[row] for row in rows]), strict=True))
            yield from (answers[row] for row in range(len(chunk)))

    def _answers(self, requests: list[Request]) -> list[Scored]:
        num_tokens = sum(len(request.tokens) - 1 for request in requests)
        answers = None if self._known is None else self._known.find(requests)
        if answers is not None:
            self.num_known += num_tokens
        else:
            fault_point("eval.batch")
            answers = self._forward(requests)
            self.num_fed += num_tokens
            if self._known is not None:
                self._known.add(requests, answers)
        if self._report is not None:
            self._report(self.num_fed, self.num_known)
        return answers

    @torch.no_grad()
    def _forward(self, requests: list[Request]) -> list[Scored]:
        batch = collate(requests).map(lambda array: torch.from_numpy(array).to(self.model.device))
        keep_BT = batch.labels_BT != IGNORED
        try:
            logits_KV = self.model.logits(batch, keep_BT)
            nll, greedy = score_rows(logits_KV, batch.labels_BT[keep_BT])
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{self.model.device} ran out of memory scoring {len(requests)} x {batch.tokens_BT.shape[1]} tokens. "
                f"Use a --batch-size below {self.batch_size}."
            ) from error
        if not np.isfinite(nll).all():
            raise NonFiniteLossError(
                f"{np.count_nonzero(~np.isfinite(nll))} of {len(nll)} targets have a log-likelihood that is not "
                "finite. The weights are damaged or --precision is too narrow: try --precision fp32."
            )
        ends = np.cumsum([request.num_scored for request in requests])[:-1]
        return [Scored(n, g) for n, g in zip(np.split(nll, ends), np.split(greedy, ends), strict=True)]


def score_rows(logits_KV: Tensor, targets_K: Tensor) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Log-sum-exp and the difference in float64, so that a sum over a corpus keeps the logits' own accuracy."""
    nll, greedy = [], []
    for first in range(0, len(targets_K), ROWS_AT_ONCE):
        exact, targets = logits_KV[first : first + ROWS_AT_ONCE].double(), targets_K[first : first + ROWS_AT_ONCE]
        nll.append(exact.logsumexp(-1) - exact.gather(-1, targets[:, None])[:, 0])
        greedy.append(exact.argmax(-1) == targets)
    return torch.cat(nll).cpu().numpy(), torch.cat(greedy).cpu().numpy()  # sync: the answers of one batch
