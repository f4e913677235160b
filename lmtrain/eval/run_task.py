"""Running of one task on one model, and assembly of the result. Called by the command line and by tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, LmtrainError, UsageError, leave_out
from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.score_targets import AnswerCache, Scorer, SharedAnswers, Subject, TargetScores
from lmtrain.eval.statistics import LEVEL, RESAMPLES, SEED, intervals
from lmtrain.eval.task import (
    NOT_PUBLISHED,
    Answers,
    Columns,
    Prepared,
    Result,
    Task,
    TaskOptions,
    TextTask,
    check_kind,
    choose_window,
    ratio,
    sum_columns,
)
from lmtrain.eval.windows import MaskedRequest, Request

_NUM_POWERS = 64  # powers of two
T = TypeVar("T")
Progress = Callable[..., None]  # (tokens fed or cached, total; earlier=tokens cached)


class PositionLosses:
    """Loss sums by position: targets with 1, 2 to 3, 4 to 7, ... tokens before them in the window."""

    def __init__(self) -> None:
        self._nll, self._targets = np.zeros(_NUM_POWERS), np.zeros(_NUM_POWERS, np.int64)

    def add(self, request: Request, nll: NDArray[np.float64]) -> None:
        """Add the losses `nll` of a request's targets to the sums for their positions, that is, by the number of tokens
        before each target in its window. Requests for a masked model are ignored, since it sees both sides of a target.
        """
        if isinstance(request, MaskedRequest):
            return  # because: a masked model sees both sides of a target
        num_fed = request.num_fed
        power = np.frexp(np.arange(num_fed - len(nll) + 1, num_fed + 1))[1] - 1
        self._nll += np.bincount(power, nll, _NUM_POWERS)
        self._targets += np.bincount(power, minlength=_NUM_POWERS)

    def rows(self) -> tuple[dict[str, Any], ...]:
        """Return a dict per range of positions (numbers of tokens before a target) that has targets: the range, the
        number of targets, and their mean loss in nats. They become the result's `loss_by_position`.
        """
        return tuple(
            {
                "tokens_before_from": 1 << power,
                "tokens_before_to": (2 << power) - 1,
                "targets": int(targets),
                "nll_per_token_nats": float(self._nll[power] / targets),
            }
            for power, targets in enumerate(self._targets)
            if targets
        )


def first_items(prepared: Prepared, limit: int) -> Prepared:
    """Return `prepared` reduced to its first `limit` items (documents, lines or questions); unchanged if it has no more
    than that. Raise UsageError if it has only one item.

    Facts stay those of the whole text, except the protocol's id, the denominator and the limit.
    """
    num_items, facts, documents = prepared.num_items, prepared.facts, prepared.documents
    if num_items == 1:
        raise UsageError(
            f"--limit={limit} takes the first items of a text, but {facts.protocol} scores this text as one item. "
            f"{leave_out('--limit', shown='Leave --limit out')}, or give a shorter text."
        )
    if limit >= num_items:
        return prepared
    requests = Reiterable(lambda: (request for request in prepared.requests if request.item < limit))
    return replace(
        prepared,
        requests=requests,
        num_targets=sum(request.num_scored for request in requests),
        text_columns={name: values[:limit] for name, values in prepared.text_columns.items()},
        documents=None if documents is None else Reiterable(lambda: islice(documents, limit)),
        facts=replace(
            facts,
            protocol=f"{facts.protocol}-first{limit}",
            denominator=f"what the first {limit} of {num_items} items have; all of them: {facts.denominator}",
            limit=limit,
        ),
    )


@dataclass(frozen=True)
class Reiterable(Generic[T]):
    """An iterable that calls `walk` for each iteration, so it can be iterated more than once."""

    walk: Callable[[], Iterator[T]]

    def __iter__(self) -> Iterator[T]:
        return self.walk()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A result with its items and columns, so that a caller can score, select or resample the same items."""

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
    hashes: Mapping[str, str] | None = None,
    **options: Any,
) -> Outcome:
    """Evaluate the model `subject` by `task` on the text `source`, and return the outcome. `stride` and `seq_len`
    (tokens) replace those of the task and the model, `limit` keeps only the first items (documents, lines or
    questions), `hashes` is text name -> SHA-256 of published texts, to note if another text is scored, and `options`
    are passed on to `score`.
    """
    check_kind(task, causal=subject.causal, pairs=subject.pairs)
    window = choose_window(task, subject.seq_len, seq_len)
    prepared, name = prepare(
        task,
        source,
        TaskOptions(
            tokenizer=subject.tokenizer, seq_len=window, stride=stride, shortened=window < subject.seq_len,
            hashes=hashes or {},
        ),
        limit,
    )
    return score(task, subject, prepared, name, seq_len=window, **options)


def prepare(
    task: Task, source: Path | TextInput, options: TaskOptions, limit: int | None = None
) -> tuple[Prepared, str]:
    """Read `source` and turn it into the requests that `task` scores. Return (the requests with facts about the text,
    the name of the source). `limit` keeps only the first items (documents, lines or questions). Raise DataError if
    there is nothing to score.
    """
    if isinstance(source, TextInput):
        assert isinstance(task, TextTask), f"{task.id} reads a file of its own kind"
        prepared, name = task.prepare_texts(source, options), source.name
    else:
        prepared, name = task.prepare(source, options), str(source)
    facts = prepared.facts
    if task.published and facts.text_sha256 != options.hashes.get(task.published, facts.text_sha256):
        prepared = replace(prepared, facts=replace(facts, notes=facts.notes | {NOT_PUBLISHED: task.published}))
    if limit is not None:
        prepared = first_items(prepared, limit)
    if prepared.num_targets == 0:
        raise DataError(f"{name} has no token that could be predicted. Give a file with more text.")
    return prepared, name


def score(
    task: Task,
    subject: Subject,
    prepared: Prepared,
    name: str,
    *,
    seq_len: int,
    batch_size: int = 8,
    resamples: int = RESAMPLES,
    cache: AnswerCache | None = None,
    shared_answers: SharedAnswers | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Score the prepared requests with the model `subject`, and return the result. Collective: every rank must call it.
    `name` describes the data in the result, `seq_len` is the window in tokens, and with 0 `resamples` no intervals are
    computed. Answers that `cache` or `shared_answers` have are not computed again.

    `cache` is the journal of a killed evaluation; `shared_answers` has the answers to the model's other tasks.
    """
    new = prepared.requests if shared_answers is None else shared_answers.new(prepared.requests)
    scorer = Scorer(subject.model, batch_size=batch_size, cache=cache, report=_progress_callback(new, progress))
    positions, began_s = PositionLosses(), perf_counter()
    scored = scorer.score if shared_answers is None else partial(shared_answers.score, score=scorer.score)
    answers = gather_answers(prepared.requests, scored(prepared.requests), positions)
    seconds = perf_counter() - began_s
    if int(answers.targets.sum()) != prepared.num_targets:
        raise LmtrainError(
            f"{task.id} scored {answers.targets.sum()} of {prepared.num_targets} targets. Please report this bug."
        )
    columns = task.columns(prepared, answers)
    sums, num_items = sum_columns(columns), len(columns["nll"])
    interval_of = intervals(columns, task.measures, resamples) if resamples else {}
    rule = f"middle {LEVEL:.0%} of {resamples} resamples of {num_items} items, seed {SEED}" if interval_of else "none"
    return Outcome(
        result=Result(
            **vars(prepared.facts),
            task=task.id,
            protocol_version=task.version,
            data=name,
            num_targets=prepared.num_targets,
            num_items=num_items,
            seq_len=seq_len,
            dtype=subject.dtype,
            layout=subject.layout,
            tokenizer_fingerprint=subject.tokenizer.fingerprint,
            nll_sum_nats=sums["nll"],
            headline=task.headline,
            measures=task.measures(sums),
            intervals=interval_of,
            intervals_rule=rule,
            loss_by_position=positions.rows(),
            seconds=seconds,
            tokens_per_s=ratio(scorer.num_fed, seconds),
            padding_share=scorer.padding_share,
            groups={
                group: task.measures(sum_columns({name: values[in_range] for name, values in columns.items()}))
                for group, items in prepared.groups.items()
                if len(in_range := items[items < num_items])  # without the items that `limit` left out
            },
        ),
        prepared=prepared,
        columns=columns,
    )


def _progress_callback(requests: Iterable[Request], progress: Progress | None) -> Callable[[int, int], None] | None:
    """Return a callback that takes (number of tokens fed to the model, number of tokens answered from the cache) and
    reports both to `progress`, out of the tokens in all `requests`. Return None if `progress` is None.
    """
    if progress is None:
        return None
    total = sum(request.num_fed for request in requests)
    progress(0, total)  # because: the time before this call must not count in the speed of scoring
    return lambda fed, cached: progress(fed + cached, total, earlier=cached)


def gather_answers(
    requests: Iterable[Request], scored: Iterable[TargetScores], positions: PositionLosses
) -> Answers:
    """Return arrays with a value per request: its item, the sum of its losses, the number of its targets, and how many
    of those were the most likely token. `scored` has the scores in the order of `requests`. The losses are also added
    to `positions`.
    """
    rows = []
    for request, scores in zip(requests, scored, strict=True):
        rows.append((request.item, scores.nll.sum(), len(scores.nll), scores.greedy.sum()))
        positions.add(request, scores.nll)
    item, nll, targets, greedy = map(np.array, zip(*rows, strict=True)) if rows else np.zeros((4, 0))
    return Answers(item.astype(np.int64), nll, targets.astype(np.int64), greedy.astype(np.int64))
