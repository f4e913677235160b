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
from lmtrain.eval.run_task import score
from lmtrain.eval.score_targets import Scorable, Subject
from lmtrain.eval.task import Answers, Prepared, Task, choose_window, sum_columns
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

_ROW_KEYS = (
    "protocol", "protocol_version", "data", "text_sha256", "num_targets", "seq_len", "dtype", "nll_sum_nats",
    "headline", "measures", "groups",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlannedEvaluation:
    """A task with its prepared text, which training scores again at each evaluation."""

    name: str  # prefix of the measures' names
    task: Task
    data: str  # description of the text's source
    prepared: Prepared

    @property
    def measures(self) -> list[str]:
        """The names of the measures that the task reports, such as "token_perplexity". They are found by computing the
        measures for answers whose losses are all 0.
        """
        items_and_targets = [(request.item, request.num_scored) for request in self.prepared.requests]
        item, scored = np.array(items_and_targets, np.int64).reshape(-1, 2).T
        columns = self.task.columns(self.prepared, Answers(item, np.zeros(len(items_and_targets)), scored, scored))
        return list(self.task.measures(sum_columns(columns)))


@dataclass(frozen=True, kw_only=True)
class TrainingEvaluator:
    """The evaluations that a training run calls; built once, before the first step."""

    planned: Sequence[PlannedEvaluation]
    tokenizer: Tokenizer
    dtype: str
    batch_size: int

    def __call__(
        self, model: ParallelModel, before_each: Callable[[], None], show_activity: Callable[[str], None]
    ) -> Iterator[dict[str, Any]]:
        """Yield a row of metrics for each task, without event and step. Collective: every rank must call it.

        `before_each` is called before each batch, `show_activity` with a progress text.
        """
        shape = model.settings.shape
        subject = Subject(
            model=cast(Scorable, _HookedModel(model, before_each)), tokenizer=self.tokenizer, seq_len=shape.seq_len,
            vocab_size=shape.vocab_size, dtype=self.dtype,
            causal=shape.causal, pairs="pair" in model.settings.terms,
        )  # fmt: skip
        for planned in self.planned:
            began = time.monotonic()
            yield self._evaluate(planned, subject, show_activity) | {"seconds": time.monotonic() - began}

    def _evaluate(
        self, planned: PlannedEvaluation, subject: Subject, show_activity: Callable[[str], None]
    ) -> dict[str, Any]:
        def report(done: int, total: int, **_: object) -> None:
            show_activity(f"evaluating {planned.name}: {done / total:.0%}")

        try:
            result = score(
                planned.task, subject, planned.prepared, planned.data,
                seq_len=choose_window(planned.task, subject.seq_len, None),
                batch_size=self.batch_size, resamples=0, progress=report,
            ).result  # fmt: skip
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{subject.model.device} ran out of memory during the evaluation of {planned.name}. "
                f"Give an eval.batch_size below {self.batch_size}."
            ) from error
        return {"name": planned.name} | {key: getattr(result, key) for key in _ROW_KEYS}


@dataclass(frozen=True)
class _HookedModel:
    """A model that calls `before_each` before each batch."""

    model: Any  # a Scorable
    before_each: Callable[[], None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def scores(self, batches: Iterable[Batch]) -> Any:
        return self.model.scores(self._hooked(batches))

    def _hooked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.before_each()
            yield batch
