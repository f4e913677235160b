"""What corpus steps read: whole documents with their positions, and bad lines as preprocessing judges them.

A document's position is its source's number and its line's first byte, one integer that grows along the inputs, so
that every task knows it without having read what comes before. Called by steps.py, shuffle.py and recipes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

from data_tools.read.budget import Budget
from data_tools.read.chunks import START, Limits, Portion, cut
from data_tools.read.content import Bad, judge, read_content
from data_tools.read.parts import WHOLE, Part
from data_tools.read.rejects import BadLines, OnError
from data_tools.read.sources import STDIN, Inputs, Source, find_sources
from lmtrain.errors import UsageError
from lmtrain.tokenizer.json_lines import Document, Reject

Documents = Iterator[tuple[int, Document]]  # positions and documents
OFFSET_BITS = 44  # of a position: files of up to 16 TiB, and a million of them

def to_line(document: Document) -> bytes:
    try:
        return json.dumps(document, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n"
    except UnicodeEncodeError:  # beside the text stands half a character, which only an escape can hold
        return json.dumps(document, separators=(", ", ": ")).encode() + b"\n"


@dataclass(frozen=True)
class Reading:
    """How documents are read: the text's key, what happens at a bad line, how long one may be, which part is read."""

    key: str | None = "text"  # None: every line is as it is, and needs no text
    on_error: OnError = OnError.STOP
    limits: Limits = field(default_factory=Limits)
    part: Part = WHOLE

    def cut(self, sources: Sequence[Source], budget: Budget) -> Iterator[Portion]:
        return cut(sources, START, self.limits, (self.key or "text",), budget, self.part)


def find_files(inputs: Inputs, *, once: bool = False) -> list[Source]:
    """The sources; each can be read as often as a step likes, or `once`."""
    sources = find_sources(inputs)
    if not once and STDIN in {source.path for source in sources}:
        raise UsageError("Standard input can be read once only, and this step reads its input again. Give files.")
    return sources


class PortionReader:
    """Iterates over a portion's documents; what is wrong stands in `bad` afterwards."""

    def __init__(self, portion: Portion, reading: Reading, large: RLock) -> None:
        self._portion, self._reading, self._large = portion, reading, large
        self.bad: list[list[Bad]] = []  # of each chunk, in order
        self.num_lines: list[int] = []

    def __iter__(self) -> Documents:
        for chunk in self._portion.chunks:
            with ExitStack() as held:
                content, bad = read_content(chunk, self._reading.limits, lambda: held.enter_context(self._large))
                rejects: list[Reject] = []
                for item, found in content.documents(self._reading.key):
                    if isinstance(found, Reject):
                        rejects.append(found)
                    else:
                        yield chunk.source << OFFSET_BITS | content.position(item), found
                bad, num_lines = judge(chunk, content, bad + content.located(rejects))
            self.bad.append(bad)
            self.num_lines.append(num_lines)


def read_documents(
    sources: Sequence[Source], reading: Reading, drop_bad: Callable[[Sequence[Bad]], object]
) -> Documents:
    """All documents, one after the other, in this process; `drop_bad` is told of those that are left out."""
    bad_lines = BadLines(reading.on_error)
    for portion in reading.cut(sources, Budget(2**62)):
        reader = PortionReader(portion, reading, RLock())
        yield from reader
        count_bad(portion, reader, bad_lines)
        for bad in reader.bad:
            drop_bad(bad)


def count_bad(portion: Portion, found: Any, bad_lines: BadLines) -> None:
    for chunk, bad, num_lines in zip(portion.chunks, found.bad, found.num_lines, strict=True):
        bad_lines.add(chunk, bad, num_lines)
