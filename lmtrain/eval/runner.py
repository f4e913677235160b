"""Runs one task on one model and puts the number together with its recipe. Called by the command line and by tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lmtrain.errors import DataError, LmtrainError
from lmtrain.eval.result import Result
from lmtrain.eval.scoring import Scorable, Scored, Scorer
from lmtrain.eval.task import Prepared, Task, TextTask, Totals
from lmtrain.eval.texts import TextInput
from lmtrain.tokenizer.base import Tokenizer

Progress = Callable[[int, int], None]  # targets scored, targets in all


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model under evaluation and what must be known of it."""

    model: Scorable
    tokenizer: Tokenizer
    seq_len: int
    vocab_size: int
    dtype: str


def run(
    task: Task,
    subject: Subject,
    source: Path | TextInput,
    *,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> tuple[Result, Prepared]:
    """The result, and what was scored, so that baselines can score the same targets."""
    check_vocabulary(subject)
    shape = subject.tokenizer, subject.seq_len, stride
    if isinstance(source, TextInput):
        assert isinstance(task, TextTask), f"{task.id} reads a file of its own kind"
        prepared, name = task.prepare_texts(source, *shape), source.name
    else:
        prepared, name = task.prepare(source, *shape), str(source)
    if prepared.num_targets == 0:
        raise DataError(f"{name} has no token to predict. Give a file with text.")
    if progress:
        progress(0, prepared.num_targets)  # because: what comes before is no part of the speed of scoring
    report = (lambda done: progress(done, prepared.num_targets)) if progress else None
    scorer = Scorer(subject.model, batch_size=batch_size, report=report)
    totals = add_up(scorer.score(prepared.requests))
    if totals.num_targets != prepared.num_targets:
        raise LmtrainError(f"{task.id} scored {totals.num_targets} of {prepared.num_targets} targets: our mistake.")
    return _result(task, subject, name, prepared, totals), prepared


def add_up(answers: Iterable[Scored]) -> Totals:
    totals = Totals()
    for scored in answers:
        totals.nll_sum_nats += float(scored.nll.sum())
        totals.num_targets += len(scored.nll)
        totals.num_greedy += int(scored.greedy.sum())
        totals.num_requests += 1
        totals.num_requests_greedy += bool(scored.greedy.all())
    return totals


def _result(task: Task, subject: Subject, name: str, prepared: Prepared, totals: Totals) -> Result:
    facts = prepared.facts
    known = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    return Result(
        protocol=task.id,
        data=name,
        num_targets=totals.num_targets,
        seq_len=subject.seq_len,
        dtype=subject.dtype,
        tokenizer_fingerprint=subject.tokenizer.fingerprint,
        nll_sum_nats=totals.nll_sum_nats,
        headline=task.headline,
        measures=task.measures(facts, totals),
        **known,
    )


def check_vocabulary(subject: Subject) -> None:
    if subject.tokenizer.vocab_size > subject.vocab_size:
        raise DataError(
            f"The tokenizer has {subject.tokenizer.vocab_size} tokens and the model {subject.vocab_size}. "
            "Evaluate a checkpoint with the tokenizer it was trained with."
        )
