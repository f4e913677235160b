"""Runs one task on one model and puts the number together with its recipe. Called by the command line and by tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from lmtrain.errors import DataError, LmtrainError
from lmtrain.eval.result import ONE_PROCESS, Result
from lmtrain.eval.scoring.partial_results import first_items
from lmtrain.eval.scoring.positions import Positions
from lmtrain.eval.scoring.scoring import Known, Scorable, Scored, Scorer
from lmtrain.eval.scoring.scoring_passes import Passes
from lmtrain.eval.source import check_kind
from lmtrain.eval.statistics.bootstrap import LEVEL, RESAMPLES, SEED, intervals
from lmtrain.eval.task import Answers, Asked, Columns, Prepared, Task, TextTask, ratio, sum_up, window_of
from lmtrain.eval.text.texts import TextInput
from lmtrain.eval.text.windows import Request
from lmtrain.tokenizer.base import Tokenizer

Progress = Callable[..., None]  # tokens fed and known already, of how many; `earlier`: known already


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model under evaluation and what must be known of it."""

    model: Scorable
    tokenizer: Tokenizer
    seq_len: int
    vocab_size: int
    dtype: str
    layout: str = ONE_PROCESS
    causal: bool = True  # else it predicts masked tokens from both sides
    pairs: bool = False  # and whether one segment follows another


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result, with what it was made from, so that others can score, select or resample the same items."""

    result: Result
    prepared: Prepared
    columns: Columns


def run(
    task: Task,
    subject: Subject,
    source: Path | TextInput,
    *,
    stride: int | None = None,
    seq_len: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    resamples: int = RESAMPLES,
    known: Known | None = None,
    passes: Passes | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """`limit`: the first items alone. `known` remembers answers, so that a killed evaluation goes on; `passes` those of
    other tasks of this model."""
    prepared, name = prepare(task, subject, source, stride=stride, seq_len=seq_len, limit=limit)
    new = prepared.requests if passes is None else passes.new(prepared.requests)
    scorer = Scorer(subject.model, batch_size=batch_size, known=known, report=_reported(new, progress))
    positions, began_s = Positions(), perf_counter()
    score = scorer.score if passes is None else partial(passes.score, score=scorer.score)
    answers = gather(prepared.requests, score(prepared.requests), positions)
    seconds = perf_counter() - began_s
    if int(answers.targets.sum()) != prepared.num_targets:
        raise LmtrainError(f"{task.id} scored {answers.targets.sum()} of {prepared.num_targets} targets: our mistake.")
    columns = task.columns(prepared, answers)
    window = window_of(task, subject.seq_len, seq_len)
    found = _result(task, subject, window, name, prepared, columns)
    result = dataclasses.replace(
        found,
        **_intervals(task, columns, resamples),
        loss_by_position=positions.rows(),
        seconds=seconds,
        tokens_per_s=ratio(scorer.num_fed, seconds),
        padding_share=scorer.padding_share,
    )
    return Outcome(result=result, prepared=prepared, columns=columns)


def prepare(
    task: Task,
    subject: Subject,
    source: Path | TextInput,
    *,
    stride: int | None = None,
    seq_len: int | None = None,
    limit: int | None = None,
) -> tuple[Prepared, str]:
    """What is to be scored, and the text's name."""
    check_kind(task, causal=subject.causal, pairs=subject.pairs)
    check_vocabulary(subject)
    window = window_of(task, subject.seq_len, seq_len)
    shortened = window < subject.seq_len
    asked = Asked(tokenizer=subject.tokenizer, seq_len=window, stride=stride, shortened=shortened)
    if isinstance(source, TextInput):
        assert isinstance(task, TextTask), f"{task.id} reads a file of its own kind"
        prepared, name = task.prepare_texts(source, asked), source.name
    else:
        prepared, name = task.prepare(source, asked), str(source)
    if limit is not None:
        prepared = first_items(prepared, limit)
    if prepared.num_targets == 0:
        raise DataError(f"{name} has no token to predict. Give a file with text.")
    return prepared, name


def _reported(requests: Iterable[Request], progress: Progress | None) -> Callable[[int, int], None] | None:
    """Time goes with the tokens that are fed: one window may score a thousand targets and the next thirty-two."""
    if progress is None:
        return None
    total = sum(request.num_fed for request in requests)
    progress(0, total)  # because: what comes before is no part of the speed of scoring
    return lambda fed, known: progress(fed + known, total, earlier=known)


def gather(requests: Iterable[Request], scored: Iterable[Scored], positions: Positions | None = None) -> Answers:
    rows = []
    for request, one in zip(requests, scored, strict=True):
        rows.append((request.item, one.nll.sum(), len(one.nll), one.greedy.sum()))
        if positions is not None:
            positions.add(request, one.nll)
    item, nll, targets, greedy = zip(*rows, strict=True) if rows else ((), (), (), ())
    count = np.int64
    return Answers(np.array(item, count), np.array(nll), np.array(targets, count), np.array(greedy, count))


def _intervals(task: Task, columns: Columns, resamples: int) -> dict[str, Any]:
    num_items = len(columns["nll"])
    found = intervals(columns, task.measures, resamples) if resamples else {}
    rule = f"middle {LEVEL:.0%} of {resamples} resamples of {num_items} items, seed {SEED}" if found else "none"
    return {"num_items": num_items, "intervals": found, "intervals_rule": rule}


def _result(task: Task, subject: Subject, window: int, name: str, prepared: Prepared, columns: Columns) -> Result:
    facts, sums = prepared.facts, sum_up(columns)
    known = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    return Result(
        task=task.id,
        data=name,
        num_targets=prepared.num_targets,
        protocol_version=task.version,
        seq_len=window,
        dtype=subject.dtype,
        layout=subject.layout,
        tokenizer_fingerprint=subject.tokenizer.fingerprint,
        nll_sum_nats=sums["nll"],
        headline=task.headline,
        measures=task.measures(sums),
        groups={name: task.measures(sum_up(part)) for name, part in _by_group(prepared, columns).items()},
        **known,
    )


def _by_group(prepared: Prepared, columns: Columns) -> dict[str, Columns]:
    """The columns of each source, less the items that were left out of them."""
    kept = {name: items[items < len(columns["nll"])] for name, items in prepared.groups.items()}
    return {name: {key: values[items] for key, values in columns.items()} for name, items in kept.items() if len(items)}


def check_vocabulary(subject: Subject) -> None:
    if subject.tokenizer.vocab_size > subject.vocab_size:
        raise DataError(
            f"The tokenizer has {subject.tokenizer.vocab_size} tokens and the model {subject.vocab_size}. "
            "Evaluate a checkpoint with the tokenizer it was trained with."
        )
