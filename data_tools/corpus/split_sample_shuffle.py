"""The steps `split`, `sample` and `shuffle`: random choices that are pure functions of a seed and the document.

A keyed hash gives every document a number. Split and sample compare the number with limits; shuffling sorts by it, in
two passes over disk, so that neither memory nor the number of parts changes the order. Called by the verbs of `lmtrain
corpus`.
"""

from __future__ import annotations

import hashlib
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, ClassVar

import numpy as np

from data_tools.corpus.copies.dedupe import content_hash
from data_tools.corpus.flow.external_sort import MEMORY_BYTES, Sorter
from data_tools.corpus.flow.run_one_corpus_step_in_workers import (
    SPLITS,
    Documents,
    Report,
    SelectionStep,
    StepOptions,
    Tally,
    find_step_sources,
    read_documents,
    refuse_overwriting,
    require_documents,
    run_step,
    to_line,
    write_documents,
)
from data_tools.read.cut_files_into_chunks import WHOLE_PART
from data_tools.read.find_input_files import Inputs
from lmtrain.errors import UsageError, example, fill_in, leave_out, own
from lmtrain.runtime.files.atomic_files import atomic_file, storage_errors
from lmtrain.tokenizer.text_from_json_lines import Document

_HEAD = struct.Struct("<QI")  # random number and byte length of a line
_MAX_BUCKETS = 512  # because: each bucket is an open file


def split_outputs(folder: Path) -> dict[str, Path]:
    """Return split -> path of its file in a folder."""
    return {name: folder / f"{name}.jsonl" for name in SPLITS}


def draw_number(seed: int, purpose: str, data: bytes) -> int:
    """Return a pseudorandom number from 0 to 2^64 - 1 that depends only on the arguments: a hash of `data`, keyed by
    `seed`. Different purposes, such as "sample" and "shuffle", give independent numbers.
    """
    key = seed.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key, person=purpose.encode()).digest(), "big")


def _position_bytes(position: int) -> bytes:
    """Return a document's position as bytes, to be hashed by `draw_number`."""
    return position.to_bytes(8, "little")


@dataclass(frozen=True)
class SplitStep:
    """The step `split`: assigns documents to train, valid and test by id or text; equal documents stay together."""

    ratios: tuple[float, ...]
    seed: int = 0
    by: str = "text"  # "text", or "id": the string or number under the key id
    name: ClassVar[str] = "split"
    files: ClassVar[Sequence[str]] = SPLITS

    def __post_init__(self) -> None:
        if len(self.ratios) != 3 or min(self.ratios) < 0 or abs(sum(self.ratios) - 1) > 1e-9:
            raise UsageError(f"--ratios={self.ratios} are not three shares that add up to 1. Give shares such "
                             f"as {example('0.98,0.01,0.01')}.")  # fmt: skip
        if self.by not in ("id", "text"):
            raise UsageError(f"--by={self.by} is not a key to split by. Use {own('id')} or {own('text')}.")

    def run(self, documents: Documents, key: str, tally: Tally) -> dict[str, bytes]:
        limits = np.cumsum(self.ratios)[:-1]
        lines: dict[str, list[bytes]] = {name: [] for name in SPLITS}
        for _, document in documents:
            document_id = document.get("id") if self.by == "id" else None
            data = content_hash(document[key]) if document_id is None else str(document_id).encode()
            share = draw_number(self.seed, self.name, data) / 2.0**64
            split = SPLITS[int(np.searchsorted(limits, share, side="right"))]
            lines[split].append(to_line(document))
            tally.keep(document[key])
            tally.changed[f"to {split}"] += 1
        return {name: b"".join(lines[name]) for name in SPLITS}


@dataclass(frozen=True)
class SampleStep(SelectionStep):
    """The step `sample`: keeps the documents whose random number is at most `limit`."""

    limit: int
    seed: int = 0
    name: ClassVar[str] = "sample"

    def select_documents(self, documents: Documents, key: str, tally: Tally) -> Iterator[Document]:
        for position, document in documents:
            if draw_number(self.seed, self.name, _position_bytes(position)) <= self.limit:
                yield document
            else:
                tally.drop("not drawn")


@dataclass(frozen=True)
class _DrawStep:
    """Step that writes only the documents' random numbers, to find the limit with which `sample` keeps a given count.
    """

    seed: int
    name: ClassVar[str] = "draw"
    files: ClassVar[Sequence[str]] = ("draws",)

    def run(self, documents: Documents, key: str, tally: Tally) -> dict[str, bytes]:
        numbers = [draw_number(self.seed, SampleStep.name, _position_bytes(position)) for position, _ in documents]
        return {"draws": np.array(numbers, np.uint64).tobytes()}


def check_sample_size(fraction: float | None, count: int | None) -> None:
    """Raise UsageError unless exactly one of `fraction`, a share, and `count` is given."""
    if fraction is not None and count is not None:
        without = f"{leave_out('--fraction')} or {leave_out('--count', shown='leave out --count')}"
        raise UsageError(f"--fraction={fraction} and --count={count} both say how much is drawn. {without}.")
    if fraction is None and count is None:
        ways = f"{fill_in('--count', 'N')} or {fill_in('--fraction', 'NUMBER')}"
        raise UsageError(f"How many documents are drawn is not given. Give {ways}.")
    if fraction is not None and not 0 <= fraction <= 1:
        raise UsageError(f"--fraction={fraction:g} is not a share. Give a number from 0 to 1.")


def sample_documents(
    inputs: Inputs, output: Path, options: StepOptions, fraction: float | None, count: int | None, seed: int
) -> Report:
    """Write about the share `fraction` of the documents, or exactly `count` of them, as drawn by `seed`, to `output`,
    in their order. Raise UsageError unless exactly one of both is given.
    """
    check_sample_size(fraction, count)
    uncounted = replace(options, report=None)  # because: the progress is that of the documents written
    limit = _sample_limit(inputs, uncounted, output.parent, fraction=fraction, count=count, seed=seed)
    return write_documents(SampleStep(limit, seed), inputs, output, options)


def _sample_limit(
    inputs: Inputs, options: StepOptions, folder: Path, *, fraction: float | None, count: int | None, seed: int
) -> int:
    """Return the number with which `SampleStep` keeps about the share `fraction` of the documents, or exactly `count`
    of them: it keeps a document if its random 64-bit number is at most that. One of both is None. `folder` is for
    temporary files.
    """
    if fraction is not None:
        return int(fraction * 2.0**64) - 1
    if not options.reading.part.is_whole:
        without = leave_out("--part", shown="leave out --part")
        raise UsageError(f"--count needs all documents, but --part reads only some. Give --fraction, or {without}.")
    assert count is not None
    find_step_sources(inputs)  # because: the inputs are read twice (limit, then sample), which standard input cannot be
    with storage_errors(folder, "Making"):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sample-", dir=folder) as temporary:
        draws = Path(temporary) / "draws"
        run_step(_DrawStep(seed), inputs, {"draws": draws}, options, Path(temporary) / "report")
        return _kth_smallest(draws, count, Path(temporary))


def _kth_smallest(draws: Path, count: int, folder: Path) -> int:
    """Return the count-th smallest of the unsigned 64-bit numbers in the file `draws`, or -1 if `count` is 0. The
    numbers are sorted on disk, in temporary files in `folder`.
    """
    with Sorter(1, folder) as sorter, open(draws, "rb") as file:
        while (numbers := np.fromfile(file, np.uint64, 1 << 20)).size:
            sorter.add(numbers[:, None])
        limit, remaining = -1, count
        for batch in sorter.batches():
            if remaining <= 0:
                break
            limit = int(batch[min(remaining, len(batch)) - 1, 0])
            remaining -= len(batch)
    return limit


def shuffle(
    inputs: Inputs, output: Path, options: StepOptions, report_file: Path, seed: int,
    memory_bytes: int = MEMORY_BYTES,
) -> Report:  # fmt: skip
    """Write all documents in random order, which depends only on `seed` and their positions in the inputs, and return
    the report. If the options name a task i of n, write only that share of the shuffled documents, to a part file.
    """
    part = options.reading.part
    key = options.reading.key or "text"
    sources = find_step_sources(inputs, read_once=part.is_whole)
    refuse_overwriting(sources, [output])
    tally = Tally()
    size = sum(source.num_bytes * (8 if source.streamed or source.kind == "parquet" else 1) for source in sources)
    # because: a bucket's lines, their sorted list and the joined output are in memory together
    num_buckets = min(4 * size // part.count // memory_bytes + 1, _MAX_BUCKETS)
    first, stop = part.share_of(1 << 64)
    with ExitStack() as stack:
        stack.enter_context(storage_errors(output, "Writing"))
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".shuffle-", dir=output.parent))
        names = [Path(folder) / f"{number:04d}" for number in range(num_buckets)]
        buckets = [stack.enter_context(open(name, "wb", buffering=1 << 16)) for name in names]
        # because: every part reads all documents, and a bad line must be counted once
        drop_bad = tally.drop_bad if part.number == 0 else lambda bad: None
        for position, document in read_documents(sources, replace(options.reading, part=WHOLE_PART), drop_bad):
            number = draw_number(seed, "shuffle", _position_bytes(position))
            if first <= number < stop:
                text, line = document[key], to_line(document)
                tally.num_in += 1
                tally.bytes_in += len(text.encode())
                tally.keep(text)
                bucket = buckets[(number - first) * num_buckets // (stop - first)]
                bucket.write(_HEAD.pack(number, len(line)) + line)
                if options.report is not None and tally.num_in % 1024 == 0:
                    options.report("shuffle", tally.num_in)
        tally.num_in += tally.dropped.total()
        if part.is_whole:
            require_documents("shuffle", tally)
        for bucket in buckets:
            bucket.close()
        with atomic_file(part.output_path(output)) as target:
            for name in names:
                with open(name, "rb") as bucket:
                    target.writelines(line for _, line in sorted(_read_entries(bucket)))
                name.unlink()
            part.output_path(report_file).unlink(missing_ok=True)  # because: it must not describe another output
    return Report("shuffle", tally, options.made_from).write(part.output_path(report_file))


def _read_entries(bucket: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (random number, JSON line) of each document in a temporary file of `shuffle`."""
    while head := bucket.read(_HEAD.size):
        number, length = _HEAD.unpack(head)
        yield number, bucket.read(length)
