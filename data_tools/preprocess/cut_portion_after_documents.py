"""Cuts a portion of the input after the document with which a run ends, for `lmtrain preprocess --max-documents`.

Called by preprocess_pipeline.py. The input is cut, not the tokenized result: so bad lines and filtered documents behind
the last document are neither reported nor counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

from data_tools.read.cut_files_into_chunks import Chunk, Portion
from data_tools.read.parse_chunks_and_bad_lines import DOCUMENT_ENDS
from data_tools.read.process_portions_in_workers import PortionWorker
from lmtrain.runtime.files.atomic_files import read_errors

_LINE_ENDS = DOCUMENT_ENDS["lines"]


class Result(Protocol):
    """A worker's result for a portion."""

    @property
    def num_documents(self) -> int: ...


R = TypeVar("R", bound=Result)


def end_after(
    max_documents: int | None, num_done: Callable[[], int], results: Iterator[tuple[Portion, R]],
    build_worker: Callable[[], PortionWorker[R]],
) -> Iterator[tuple[Portion, R]]:  # fmt: skip
    """Yield the results up to the one with document number `max_documents` (None: all), which is cut behind this
    document. `num_done` returns the number of documents of all results that the caller is done with; `build_worker`
    returns the worker that does the cut portion again.
    """
    for portion, result in results:
        missing = None if max_documents is None else max_documents - num_done()
        if missing is None or result.num_documents < missing:
            yield portion, result
        else:
            worker = build_worker()
            portion = _cut_after(portion, missing, worker)
            yield portion, worker.run(portion)
            return
        del portion, result  # because: a variable would keep the document in memory while the next one is read


def _cut_after(portion: Portion, num_documents: int, worker: PortionWorker[Result]) -> Portion:
    """Return the smallest part of a portion, from its start, in which the worker finds `num_documents` documents. The
    whole portion must have at least as many.
    """
    parts = [_prefix(portion, number, part) for number, chunk in enumerate(portion.chunks) for part in _parts(chunk)]
    num_parts = num_documents
    # because: each part has at most one document more than the one before it, so that no step goes too far
    while missing := num_documents - worker.run(parts[num_parts - 1]()).num_documents:
        num_parts += missing
    return parts[num_parts - 1]()


def _prefix(portion: Portion, number: int, last: Callable[[], Chunk]) -> Callable[[], Portion]:
    """Return a function that builds the portion of the first `number` chunks and then `last`."""
    return lambda: Portion([*map(replace, portion.chunks[:number]), last()])


def _parts(chunk: Chunk) -> Iterator[Callable[[], Chunk]]:
    """Yield functions that build each part of a chunk, from its start, that ends where a document may end; last the
    whole chunk.
    """
    if chunk.kind == "parquet":
        for num_rows in range(1, len(chunk.rows)):
            yield lambda stop=num_rows: replace(chunk, rows=chunk.rows[:stop], stop=chunk.start + stop)  # type: ignore[misc]
    elif chunk.kind != "text" and not chunk.problem:
        data = bytes(_read_plain(chunk) if chunk.content is None else chunk.content)
        for match in DOCUMENT_ENDS.get(chunk.kind, _LINE_ENDS).finditer(data):
            if (size := match.end()) < len(data):
                yield lambda size=size: replace(  # type: ignore[misc]
                    chunk, stop=chunk.start + size, content=None if chunk.plain else data[:size]
                )
    yield lambda: replace(chunk)


def _read_plain(chunk: Chunk) -> bytes:
    """Return the bytes of a chunk that is a range of a plain file."""
    with read_errors(chunk.path), open(chunk.path, "rb") as file:
        file.seek(chunk.start)
        return file.read(chunk.stop - chunk.start)
