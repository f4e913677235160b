"""Text to datasets: sources are cut, workers encode, this thread writes in order. Called by `lmtrain preprocess`.

At most a few portions are in memory, however large the corpus. The output is the same, byte for byte, whatever the
number of workers and however often the run was killed on the way, and appears only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from data_tools.preprocess.filters import Filters
from data_tools.preprocess.outputs import Names, Outputs, Totals
from data_tools.preprocess.work import Job, Result, Worker
from data_tools.read.ahead import budget_of, worked_ahead
from data_tools.read.chunks import Limits, Portion, cut
from data_tools.read.rejects import BadLines, OnError
from data_tools.read.sources import STDIN, Inputs, Source, find_sources
from lmtrain.data.store.indexed import dtype_for
from lmtrain.errors import DataError, UsageError
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.tokenizer.fast import TwinEncoder, build_encoder


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything but the inputs, the tokenizer and the output."""

    workers: int = 1
    keys: tuple[str, ...] = ("text",)
    append_eod: bool | None = None  # None: whenever the tokenizer has such a token
    filters: Filters = field(default_factory=Filters)
    split_sentences: bool = False  # one sequence each, as BERT's samples are made of
    lines_end_sentences: bool = False
    on_error: OnError = OnError.STOP
    max_bad: int | None = None
    limits: Limits = field(default_factory=Limits)
    shard_tokens: int | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers={self.workers} must be at least 1. Leave it out to use every core.")
        if len(set(self.keys)) < len(self.keys) or not self.keys:
            raise UsageError(f"--key names {', '.join(self.keys) or 'nothing'}. Name each key once.")
        if self.shard_tokens is not None and self.shard_tokens < 1:
            raise UsageError(f"--shard-tokens={self.shard_tokens} must be at least 1. Leave it out for one dataset.")


@dataclass(frozen=True)
class Standing:
    """Where a run stands; total_bytes is 0 where nobody knows."""

    done_bytes: int  # of the source files
    total_bytes: int
    num_text_bytes: int
    num_tokens: int
    num_documents: int


@dataclass(frozen=True)
class Summary:
    num_documents: int
    num_tokens: int
    num_bytes: int  # of the texts
    seconds: float
    sync_seconds: float  # of those: until all was on disk
    num_shards: int
    resumed_documents: int  # were there from an earlier, killed run
    rejects: dict[str, int]  # bad lines by cause
    filtered: dict[str, int]  # documents left out, by filter
    lengths: dict[str, int]  # documents by their number of tokens
    files: tuple[str, ...]

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / self.num_tokens


def preprocess(
    inputs: Inputs,
    tokenizer: Tokenizer,
    output: Path,
    options: Options | None = None,
    *,
    report: Callable[[Standing], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Summary:
    """Tokenize the inputs into the dataset `output`, or several. `say` gets what a user should know on the way."""
    began = time.perf_counter()
    options = options or Options()
    options = replace(options, append_eod=_whether_eod(tokenizer, options.append_eod))
    sources = find_sources(inputs)
    _check_keys(sources, options)
    names = Names(output, options.keys, dtype_for(tokenizer.vocab_size), options.shard_tokens, options.overwrite)
    data = tokenizer.to_bytes()
    with Outputs(names, _identity(sources, data, options), tokenizer) as outputs:
        resumed = outputs.totals.num_documents if outputs.resumed else 0
        _say_what_was_found(outputs, say)
        if not outputs.finished:
            _run(sources, tokenizer, data, options, outputs, report)
        if outputs.totals.num_tokens == 0:
            raise DataError(_nothing(outputs.totals, len(sources)))
        files = outputs.finish()
    totals = outputs.totals
    return Summary(
        totals.num_documents,
        totals.num_tokens,
        totals.num_text_bytes,
        time.perf_counter() - began,
        outputs.sync_seconds,
        outputs.num_shards,
        resumed,
        dict(totals.bad),
        dict(totals.filtered),
        _named_bins(totals.lengths),
        tuple(map(str, files)),
    )


def _run(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    data: bytes,
    options: Options,
    outputs: Outputs,
    report: Callable[[Standing], None] | None,
) -> None:
    job = Job(
        data, options.keys, tokenizer.eod_id if options.append_eod else None, options.limits, options.filters,
        options.split_sentences, options.lines_end_sentences, options.on_error is OnError.QUARANTINE,
    )  # fmt: skip
    total = sum(source.num_bytes for source in sources) if STDIN not in {s.path for s in sources} else 0
    budget = budget_of(options.workers, options.limits)
    totals = outputs.totals
    bad_lines = BadLines(options.on_error, options.max_bad, totals.bad, totals.line)
    portions = cut(sources, totals.place, options.limits, options.keys, budget)
    encoder = build_encoder(tokenizer)
    # because: the compiled encoder lets threads run at once; its twin holds the interpreter, as looking at texts does
    processes = options.workers > 1 and (job.looks_at_texts or isinstance(encoder, TwinEncoder))
    build = partial(Worker, job) if processes else partial(Worker, job, encoder)
    with worked_ahead(portions, build, options.workers, budget, processes=processes) as results:
        _ = tokenizer.fingerprint  # because: it takes a while, and now the workers are busy beside
        for portion, result in results:
            outputs.add(result.batches, _count(portion, result, totals, bad_lines))
            if report is not None:
                counts = totals.num_text_bytes, totals.num_tokens, totals.num_documents
                report(Standing(totals.num_disk_bytes, total, *counts))
            del portion, result  # because: a name keeps a document alive while the next one is read


def _count(portion: Portion, result: Result, totals: Totals, bad_lines: BadLines) -> bytes:
    """Bring the totals up to the end of a portion; raises at a bad line too many. Returns the lines for the rejects."""
    rejects = []
    for chunk, bad, num_lines in zip(portion.chunks, result.bad, result.num_lines, strict=True):
        rejects.append(bad_lines.add(chunk, bad, num_lines))
        totals.line = bad_lines.line
        totals.place = chunk.next
        totals.num_disk_bytes += chunk.num_disk_bytes
    totals.filtered.update(result.filtered)
    return b"".join(rejects)


# ---- small matters


def _whether_eod(tokenizer: Tokenizer, asked: bool | None) -> bool:
    if asked and tokenizer.eod_id is None:
        raise UsageError("--append-eod needs an end-of-document token; the tokenizer has none. Use --no-append-eod.")
    return tokenizer.eod_id is not None if asked is None else asked


def _check_keys(sources: Sequence[Source], options: Options) -> None:
    if len(options.keys) > 1 and (texts := [source.path for source in sources if source.kind == "text"]):
        raise UsageError(f"{texts[0]} is one text without keys, and --key names {len(options.keys)}. Name one.")


def _identity(sources: Sequence[Source], tokenizer: bytes, options: Options) -> str | None:
    """What must be the same for a killed run to be gone on with; of a pipe nobody knows."""
    if STDIN in {source.path for source in sources}:
        return None
    tree: list[Any] = [
        [(str(s.path.absolute()), s.num_bytes, s.mtime_ns) for s in sources],
        hashlib.sha256(tokenizer).hexdigest(),
        [options.keys, options.append_eod, options.shard_tokens, options.on_error],
        [options.split_sentences, options.lines_end_sentences],
        [options.limits.slice_bytes, options.limits.max_doc_bytes],
        options.filters.identity(),
    ]
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


def _say_what_was_found(outputs: Outputs, say: Callable[[str], None] | None) -> None:
    if say is None:
        return
    if outputs.redone:
        say("some of what a run that was cut short left behind is damaged and is made again")
    if outputs.resumed:
        say(f"going on after the {outputs.totals.num_documents} documents of a run that was cut short")
    elif outputs.dropped:
        say("starting over: what a run that was cut short left behind is of other inputs or settings")


def _nothing(totals: Totals, num_sources: int) -> str:
    bad, filtered = sum(totals.bad.values()), sum(totals.filtered.values())
    why = f"{totals.num_documents} empty documents, {bad} bad lines, {filtered} filtered documents"
    return f"The {num_sources} input files hold no text that could be used ({why}). Check the files and options."


def _named_bins(lengths: list[int]) -> dict[str, int]:
    """{"0": 3, "1": 1, "2-3": 7}: up to the longest."""
    last = max((i for i, count in enumerate(lengths) if count), default=0)
    names = ["0", "1", *(f"{2 ** (i - 1)}-{2**i - 1}" for i in range(2, last + 1))]
    return dict(zip(names, lengths[: last + 1], strict=False))

