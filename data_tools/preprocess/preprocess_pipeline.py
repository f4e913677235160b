"""The preprocessing pipeline: sources are cut, workers encode, this thread writes in order.

Called by `lmtrain preprocess`. At most a few portions are in memory, however large the corpus. The output is identical,
byte for byte, for any number of workers and any number of kills and resumes, and appears only when complete.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from data_tools.preprocess.cut_portion_after_documents import end_after
from data_tools.preprocess.encode_documents import (
    DocumentConverter,
    SentenceConverter,
    SequenceBatch,
    prepend_token,
)
from data_tools.preprocess.identify_run import FILES, TOKENIZER, Identity
from data_tools.preprocess.length_and_script_filters import Filters
from data_tools.preprocess.resumable_dataset_writer import OutputNames, Outputs, Totals, existing_datasets
from data_tools.read.cut_files_into_chunks import Chunk, Portion, SizeLimits, cut_portions
from data_tools.read.find_input_files import STDIN, Inputs, Source, TextSplit, find_sources
from data_tools.read.line_ends_of_other_systems import line_end_notices
from data_tools.read.parse_chunks_and_bad_lines import (
    COMMAND_LINE,
    BadLine,
    BadLines,
    ChunkBadLines,
    Content,
    OnError,
    OptionNames,
    TextList,
    collect_bad_lines,
    read_content,
)
from data_tools.read.process_portions_in_workers import build_budget, process_portions
from lmtrain.data.store.indexed_dataset import SUFFIXES, DatasetInfo, dataset_file
from lmtrain.errors import DataError, UsageError, leave_out, way
from lmtrain.runtime import compiled_helpers
from lmtrain.tokenizer.bulk_encoding import Encoder, TwinEncoder, build_encoder, dtype_for
from lmtrain.tokenizer.text_from_json_lines import Reject
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a run other than the inputs, the tokenizer and the output."""

    workers: int = 1
    keys: tuple[str, ...] = ("text",)
    append_eod: bool | None = None  # None: if the tokenizer has such a token
    prepend_bos: bool = False
    filters: Filters = field(default_factory=Filters)
    split_sentences: bool = False  # one sequence per sentence, as BERT's samples require
    lines_end_sentences: bool = False
    on_error: OnError = OnError.STOP
    max_bad: int | None = None
    limits: SizeLimits = field(default_factory=SizeLimits)
    shard_tokens: int | None = None
    max_documents: int | None = None  # the run ends with this many documents
    overwrite: bool = False
    text_split: TextSplit = "file"  # what is a document of a text file
    names: OptionNames = COMMAND_LINE

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers={self.workers} must be at least 1. {leave_out()} to use every core.")
        if len(set(self.keys)) < len(self.keys) or not self.keys:
            raise UsageError(f"--key names {', '.join(self.keys) or 'nothing'}. Name one key or more, each once.")
        if self.shard_tokens is not None and self.shard_tokens < 1:
            raise UsageError(f"--shard-tokens={self.shard_tokens} must be at least 1. {leave_out()} for one dataset.")
        if self.max_documents is not None and self.max_documents < 1:
            raise UsageError(f"--max-documents={self.max_documents} must be at least 1. {leave_out()} for all.")


@dataclass
class TokenizedPortion:
    """A worker's result for a portion."""

    batches: list[SequenceBatch]  # one per key; document i of each is from the same line
    bad: list[ChunkBadLines]  # bad lines of each chunk, in order
    filtered: Counter[str]

    @property
    def num_documents(self) -> int:
        return len(self.batches[0].num_sequences)


class TokenizeWorker:
    """Worker that filters and encodes the documents of a portion."""

    def __init__(
        self, options: Options, bos_id: int | None, eod_id: int | None, tokenizer: bytes,
        encoder: Encoder | None = None,
    ) -> None:  # fmt: skip
        """Set up the worker. `bos_id` is put before and `eod_id` after every document.

        An encoder cannot be pickled; in another process it is None and is built from the tokenizer's bytes.
        """
        self._options, self._bos_id, self._has_eod = options, bos_id, eod_id is not None
        encoder = encoder if encoder is not None else build_encoder(Tokenizer.from_bytes(tokenizer))
        self._converter: DocumentConverter | SentenceConverter = (
            SentenceConverter(encoder, eod_id, options.lines_end_sentences)
            if options.split_sentences
            else DocumentConverter(encoder, self._has_eod)
        )
        self._filters = list(options.filters.build_text_filters())
        # because: memory is reserved for one longest document at a time, whatever the number of workers
        self._long_document_lock = RLock()

    def run(self, portion: Portion) -> TokenizedPortion:
        """Read, filter and tokenize the documents of a portion, which is some chunks of the input."""
        if self._options.max_documents is not None:  # because: the portion is read again if the run ends within it
            portion = Portion([replace(c, content=c.content and bytes(c.content)) for c in portion.chunks])
        if portion.chunks[0].kind == "text":
            return self._run_whole_files(portion.chunks)
        results = [self._run_chunk(chunk) for chunk in portion.chunks]
        for chunk in portion.chunks:
            chunk.content = None  # because: the portion is kept until its output is written; its content is not needed
        return results[0] if len(results) == 1 else _join_results(results)

    def _run_chunk(self, chunk: Chunk) -> TokenizedPortion:
        """Read, filter and tokenize the documents of one chunk of JSON lines or table rows."""
        with ExitStack() as locks:
            lock_long_documents = partial(locks.enter_context, self._long_document_lock)
            content, bad = read_content(chunk, self._options.limits, lock_long_documents)
            batches, rejects, filtered = self._encode(content)
            bad += content.locate_rejects(rejects, self._options.on_error is OnError.QUARANTINE)
            return TokenizedPortion(batches, [collect_bad_lines(chunk, content, bad)], filtered)

    def _run_whole_files(self, chunks: list[Chunk]) -> TokenizedPortion:
        """Read, filter and tokenize chunks that are one text file each, a document per file; all are tokenized in one
        call.
        """
        texts: list[tuple[Any, ...]] = []
        bad: list[list[BadLine]] = []
        chunk_of_text: list[int] = []  # chunk number of each text
        with ExitStack() as locks:
            lock_long_documents = partial(locks.enter_context, self._long_document_lock)
            for number, chunk in enumerate(chunks):
                content, problems = read_content(chunk, self._options.limits, lock_long_documents)
                texts += content.rows.values() if isinstance(content, TextList) else ()
                chunk_of_text += [number] * (len(texts) - len(chunk_of_text))
                bad.append(problems)
            all_texts = TextList(texts)
            batches, rejects, filtered = self._encode(all_texts)
        for reject in rejects:
            bad[chunk_of_text[reject.item]] += all_texts.locate_rejects([reject])
        return TokenizedPortion(batches, [(problems, 1) for problems in bad], filtered)

    def _encode(self, content: Content) -> tuple[list[SequenceBatch], list[Reject], Counter[str]]:
        """Filter and tokenize the documents of a chunk. Return (a batch of sequences per key, rejected documents,
        number of documents dropped by each filter).
        """
        filtered = self._filter_texts(content) if self._filters else Counter()
        batches = self._encode_keys(content)
        rejects = batches[0].rejects
        if len(batches) > 1:  # because: a line that is bad for one key is dropped for all
            rejects_by_item = {reject.item: reject for batch in reversed(batches) for reject in batch.rejects}
            rejects = [rejects_by_item[item] for item in sorted(rejects_by_item)]
            if any(len(batch.rejects) < len(rejects) for batch in batches):
                batches = self._encode_keys(content.without(rejects_by_item))
        if self._options.filters.needs_token_counts and len(batches[0].num_sequences):
            filtered += self._filter_lengths(content, batches, {reject.item for reject in rejects})
        return batches, rejects, filtered

    def _encode_keys(self, content: Content) -> list[SequenceBatch]:
        """Return the batch of each key, with every document that is valid for that key."""
        batches = [self._converter(content, number, key) for number, key in enumerate(self._options.keys)]
        return batches if self._bos_id is None else [prepend_token(batch, self._bos_id) for batch in batches]

    def _filter_texts(self, content: Content) -> Counter[str]:
        """Drop the documents whose text under the first key fails a text filter; return the number dropped by each
        filter. Documents whose text is invalid stay, and are rejected by the encoder.
        """
        filtered: Counter[str] = Counter()
        dropped = []
        for item, text in content.texts(0, self._options.keys[0]):
            if isinstance(text, str):
                failed = next((name for name, keep in self._filters if not keep(text)), None)
                if failed is not None:
                    dropped.append(item)
                    filtered[failed] += 1
        content.drop(dropped)
        return filtered

    def _filter_lengths(self, content: Content, batches: list[SequenceBatch], rejected: set[int]) -> Counter[str]:
        """Remove the documents that have too few or too many tokens under the first key from all batches, by replacing
        the entries of the list `batches`. Return the number removed by each limit. `rejected` are the numbers in
        `content` of documents that are not in the batches.
        """
        lengths = batches[0].document_lengths()
        verdict = self._options.filters.classify_lengths(lengths - (lengths > 0) * self._has_eod)
        if not verdict.any():
            return Counter()
        items = (item for item in content.items() if item not in rejected)
        removed = content.select([item for item, v in zip(items, verdict.tolist(), strict=True) if v])
        for number, (batch, removed_batch) in enumerate(zip(batches, self._encode_keys(removed), strict=True)):
            batches[number] = batch.select(verdict == 0, batch.num_text_bytes - removed_batch.num_text_bytes)
        counts = {"min_tokens": int((verdict == 1).sum()), "max_tokens": int((verdict == 2).sum())}
        return Counter({name: count for name, count in counts.items() if count})


def _join_results(results: Sequence[TokenizedPortion]) -> TokenizedPortion:
    """Concatenate the results of the small chunks of one portion, in order, into one result."""
    return TokenizedPortion(
        [
            SequenceBatch(
                np.concatenate([part.tokens for part in parts]),
                np.concatenate([part.lengths for part in parts]),
                np.concatenate([part.num_sequences for part in parts]),
                sum(part.num_text_bytes for part in parts),
                [],
            )
            for parts in zip(*(result.batches for result in results), strict=True)
        ],
        [bad for result in results for bad in result.bad],
        sum((result.filtered for result in results), Counter()),
    )


@dataclass(frozen=True)
class Progress:
    """Progress of a run; total_bytes is 0 if the total is unknown."""

    done_bytes: int  # bytes of the source files done
    total_bytes: int
    num_text_bytes: int
    num_tokens: int
    num_documents: int


@dataclass(frozen=True)
class Summary:
    """Result of a run, for the report and the user."""

    num_documents: int
    num_tokens: int
    num_bytes: int  # UTF-8 bytes of the texts
    seconds: float
    sync_seconds: float  # part of `seconds` spent syncing to disk
    num_shards: int
    resumed_documents: int  # documents kept from an earlier, killed run
    rejects: dict[str, int]  # bad lines by cause
    filtered: dict[str, int]  # dropped documents by filter
    lengths: dict[str, int]  # documents by number of tokens
    files: tuple[str, ...]
    num_text_files: int  # input files of plain text
    is_new: bool = True  # False if the datasets were made already, of the same inputs and options

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / self.num_tokens


def check_begin_token(tokenizer: Tokenizer) -> None:
    """Raise UsageError if a tokenizer has no token with which documents can begin."""
    if tokenizer.bos_id is None:
        ends = f" Its token {tokenizer.piece(tokenizer.eod_id)} ends documents." if tokenizer.eod_id is not None else ""
        raise UsageError(
            "--prepend-bos needs a beginning-of-text token, but the tokenizer has none."
            f"{ends} {leave_out('--prepend-bos')}."
        )


def preprocess(
    inputs: Inputs,
    tokenizer: Tokenizer,
    output: Path,
    options: Options = Options(),
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    notify: Callable[[str], None] = lambda notice: None,
) -> Summary:
    """Tokenize the inputs into the dataset with the prefix `output`, or with several keys or shards into several
    datasets, and return a summary. `report` is called with the progress after each portion of the input, `notify` with
    notices for the user.
    """
    began = time.perf_counter()
    if options.append_eod is None:
        options = replace(options, append_eod=tokenizer.eod_id is not None)
    elif options.append_eod and tokenizer.eod_id is None:
        without = way("--no-append-eod", instead_of="--append-eod")
        raise UsageError(f"--append-eod needs an end-of-document token; the tokenizer has none. Use {without}.")
    if options.prepend_bos and options.split_sentences:
        either = (leave_out(option, shown=option) for option in ("--prepend-bos", "--split-sentences"))
        raise UsageError("--prepend-bos is for whole documents, so --split-sentences excludes it. Leave out "
                         f"{' or '.join(either)}.")  # fmt: skip
    if options.prepend_bos:
        check_begin_token(tokenizer)
    sources = find_sources(inputs, options.text_split, options.names.split)
    for notice in line_end_notices(sources):
        notify(notice)
    if len(options.keys) > 1 and (texts := [source.path for source in sources if source.is_text]):
        raise UsageError(f"{texts[0]} is plain text without keys, but --key names {len(options.keys)} keys. Give one.")
    names = OutputNames(output, options.keys, dtype_for(tokenizer.vocab_size), options.shard_tokens, options.overwrite)
    tokenizer_bytes = tokenizer.to_bytes()
    identity = _run_identity(sources, tokenizer_bytes, options)
    if (existing := existing_datasets(names, identity)) is not None:
        return _summary_of_existing(existing, names, sources)
    with Outputs(names, identity, tokenizer) as outputs:
        resumed = outputs.totals.num_documents if outputs.resumed else 0
        _report_earlier_run(outputs, sources, notify)
        if not outputs.finished and outputs.totals.num_documents != options.max_documents:
            _tokenize_portions(sources, tokenizer, tokenizer_bytes, options, outputs, report, notify)
        if outputs.totals.num_tokens == 0:
            bad, filtered = outputs.totals.bad, outputs.totals.filtered.total()
            causes = "".join(f", of which {count}: {cause}" for cause, count in bad.most_common(3))
            raise DataError(
                f"The input holds no text that could be used (files: {len(sources)}, empty documents: "
                f"{outputs.totals.num_documents}, filtered documents: {filtered}, bad lines: {bad.total()}{causes}). "
                f"Check the files and options: {options.names.key} is the key of the text."
            )
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
        _label_bins(totals.lengths),
        tuple(map(str, files)),
        sum(source.is_text for source in sources),
    )


def _summary_of_existing(infos: list[DatasetInfo], names: OutputNames, sources: Sequence[Source]) -> Summary:
    """Return the summary of a run that finds its datasets made already; `infos` are their sidecars."""
    prefixes, num_documents = list(names.existing_prefixes()), sum(info.num_documents for info in infos)
    return Summary(
        num_documents // len(names.keys), sum(info.num_tokens for info in infos),
        sum(info.num_bytes for info in infos), 0.0, 0.0, len(prefixes) // len(names.keys),
        num_documents // len(names.keys), {}, {}, {},
        tuple(str(dataset_file(prefix, suffix)) for prefix in prefixes for suffix in SUFFIXES),
        sum(source.is_text for source in sources), is_new=False,
    )  # fmt: skip


def _tokenize_portions(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    tokenizer_bytes: bytes,
    options: Options,
    outputs: Outputs,
    report: Callable[[Progress], None],
    notify: Callable[[str], None],
) -> None:
    """Tokenize the sources, from the position that `outputs` has reached, and add the results to `outputs` in input
    order. `tokenizer_bytes` is the tokenizer for worker processes; `report` receives the progress and `notify` notices
    for the user.
    """
    eod_id = tokenizer.eod_id if options.append_eod else None
    total = sum(source.num_bytes for source in sources) if STDIN not in {s.path for s in sources} else 0
    budget = build_budget(options.workers, options.limits)
    totals = outputs.totals
    bad_lines = BadLines(options.on_error, options.max_bad, totals.bad, totals.line, options.names)
    portions = cut_portions(sources, totals.place, options.limits, options.keys, budget)
    encoder = build_encoder(tokenizer)
    if isinstance(encoder, TwinEncoder):
        is_compiled = compiled_helpers.lib is not None
        reason = "its rules have no compiled version" if is_compiled else "nothing was compiled (`lmtrain env`)"
        notify(
            f"this tokenizer is slow because {reason}: expect 0.5 to 2 MB of text per second for each of "
            f"{options.workers} workers; GPT-2's tokenizer is 25 to 90 times as fast"
        )
    # because: the compiled encoder releases the interpreter lock; its twin and the text filters hold it
    looks_at_texts = options.filters.needs_text or options.split_sentences
    processes = options.workers > 1 and (looks_at_texts or isinstance(encoder, TwinEncoder))
    bos_id = tokenizer.bos_id if options.prepend_bos else None
    build = partial(TokenizeWorker, options, bos_id, eod_id, tokenizer_bytes, None if processes else encoder)
    with process_portions(portions, build, options.workers, budget, use_processes=processes) as results:
        _ = tokenizer.fingerprint  # because: it takes a while, and the workers are already busy
        for portion, result in end_after(options.max_documents, lambda: totals.num_documents, results, build):
            outputs.add(result.batches, _count_portion(portion, result, totals, bad_lines))
            report(Progress(
                totals.num_disk_bytes, total, totals.num_text_bytes, totals.num_tokens, totals.num_documents
            ))
            del portion, result  # because: a variable would keep the document in memory while the next one is read


def _count_portion(portion: Portion, result: TokenizedPortion, totals: Totals, bad_lines: BadLines) -> bytes:
    """Add a portion's bad lines, filtered documents and end position to the totals; return its lines for the rejects
    file. Raise DataError at a bad line that the options do not allow.
    """
    rejects = []
    for chunk, (bad, num_lines) in zip(portion.chunks, result.bad, strict=True):
        rejects.append(bad_lines.add(chunk, bad, num_lines))
        totals.line = bad_lines.line
        totals.place = chunk.next
        totals.num_disk_bytes += chunk.num_disk_bytes
    totals.filtered.update(result.filtered)
    return b"".join(rejects)


# ---- identity and notices




def _run_identity(sources: Sequence[Source], tokenizer: bytes, options: Options) -> Identity | None:
    """Return the identity of a run, which a killed run must have to be resumed; None if it reads standard input."""
    if STDIN in {source.path for source in sources}:
        return None
    facts = options.filters.identity() | {
        "--key": options.keys, "--append-eod": options.append_eod, "--prepend-bos": options.prepend_bos,
        "--split": options.text_split, "--split-sentences": options.split_sentences,
        "--lines-end-sentences": options.lines_end_sentences, "--shard-tokens": options.shard_tokens,
        "--on-error": options.on_error, "--max-doc-bytes": options.limits.max_doc_bytes,
        "--max-documents": options.max_documents, TOKENIZER: hashlib.sha256(tokenizer).hexdigest(),
        "the size of a slice": options.limits.slice_bytes,
        FILES: [(str(source.path.absolute()), source.num_bytes, source.mtime_ns) for source in sources],
        "the format of an input file": [(source.kind, source.codec) for source in sources],
    }  # fmt: skip
    result: Identity = json.loads(json.dumps(facts))
    return result


def _report_earlier_run(outputs: Outputs, sources: Sequence[Source], notify: Callable[[str], None]) -> None:
    """Notify the user if the work of an interrupted run is used, is used in part because of damage, or is discarded."""
    if outputs.found_damage:
        notify("part of the work of an interrupted run is damaged and is done again")
    if outputs.resumed:
        notify(f"resuming after the {outputs.totals.num_documents:,} documents of an interrupted run")
        number, offset = outputs.totals.place
        if offset and not outputs.finished and sources[number].streamed:
            notify(
                f"{sources[number].path} can only be read from its start: {format_bytes(offset)} of its text are read "
                "again, and not tokenized again"
            )
    elif outputs.discarded:
        notify("starting over: --overwrite was given, or the interrupted run read a pipe or had finished nothing")


def _label_bins(lengths: list[int]) -> dict[str, int]:
    """Return a histogram of document lengths as label -> number of documents, such as {"0": 3, "1": 1, "2-3": 7}.
    `lengths` are the numbers of documents with 0, 1, 2-3, 4-7, ... tokens.
    """
    last = max((i for i, count in enumerate(lengths) if count), default=0)
    names = ["0", "1", *(f"{2 ** (i - 1)}-{2**i - 1}" for i in range(2, last + 1))]
    return dict(zip(names, lengths[: last + 1], strict=False))
