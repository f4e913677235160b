"""Evaluations of a model during training, at the layout and in the precision of the run.

Built by `lmtrain pretrain` from its plan, and called by the training loop. Uses no random numbers and changes no
weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from lmtrain.batch import Batch
from lmtrain.errors import OutOfMemoryError
from lmtrain.eval.runner import Subject, score
from lmtrain.eval.scoring import Scorable
from lmtrain.eval.task import Answers, Prepared, Task, sum_up, window_of
from lmtrain.parallel.model import ParallelModel
from lmtrain.tokenizer.base import Tokenizer

_KEPT = (
    "protocol", "protocol_version", "data", "text_sha256", "num_targets", "seq_len", "dtype", "nll_sum_nats",
    "headline", "measures", "groups",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Planned:
    name: str  # prefix of the measures' names
    task: Task
    data: str  # description of the text's source
    prepared: Prepared

    @property
    def measures(self) -> list[str]:
        """The names of the task's measures, computed from the answers of a model that is sure of every target."""
        asked = [(request.item, request.num_scored) for request in self.prepared.requests]
        item, scored = np.array(asked, np.int64).reshape(-1, 2).T
        columns = self.task.columns(self.prepared, Answers(item, np.zeros(len(asked)), scored, scored))
        return list(self.task.measures(sum_up(columns)))


@dataclass(frozen=True, kw_only=True)
class DuringTraining:
    planned: Sequence[Planned]
    tokenizer: Tokenizer
    dtype: str
    batch_size: int

    def __call__(
        self, model: ParallelModel, before_each: Callable[[], None], doing: Callable[[str], None]
    ) -> Iterator[dict[str, Any]]:
        """Yield a row of metrics for each task, without event and step. Collective: every rank must call it.

        `before_each` is called before each batch, `doing` with a progress text.
        """
        shape = model.settings.shape
        subject = Subject(
            model=cast(Scorable, _Asking(model, before_each)), tokenizer=self.tokenizer, seq_len=shape.seq_len,
            vocab_size=shape.vocab_size, dtype=self.dtype,
            causal=shape.causal, pairs="pair" in model.settings.terms,
        )  # fmt: skip
        for one in self.planned:
            began = time.monotonic()
            yield self._row(one, subject, doing) | {"seconds": time.monotonic() - began}

    def _row(self, one: Planned, subject: Subject, doing: Callable[[str], None]) -> dict[str, Any]:
        def report(done: int, total: int, **_: object) -> None:
            doing(f"evaluating {one.name}: {done / total:.0%}")

        try:
            found = score(
                one.task, subject, one.prepared, one.data, seq_len=window_of(one.task, subject.seq_len, None),
                batch_size=self.batch_size, resamples=0, progress=report,
            ).result  # fmt: skip
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{subject.model.device} ran out of memory evaluating {one.name}. "
                f"Use an eval.batch_size below {self.batch_size}."
            ) from error
        return {"name": one.name} | {key: getattr(found, key) for key in _KEPT}


@dataclass(frozen=True)
class _Asking:
    """A model that calls `before_each` before each batch."""

    model: Any  # a Scorable
    before_each: Callable[[], None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def scores(self, batches: Iterable[Batch]) -> Any:
        return self.model.scores(self._asked(batches))

    def _asked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.before_each()
            yield batch
