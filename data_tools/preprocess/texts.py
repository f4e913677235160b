"""All documents of some files, one by one, for who needs texts and no dataset: `tokenizer train`, `lmtrain eval`.

The first bad line stops with an error that says where and why.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from data_tools.read.chunks import START, Budget, Chunk, Limits, cut
from data_tools.read.content import Bad, read_content, where
from data_tools.read.sources import Source
from lmtrain.errors import DataError
from lmtrain.tokenizer.json_lines import Reject

ALL = -1


class Texts:
    """As often as one iterates. `report` is told the bytes of the sources that were read, and -1 when all were."""

    def __init__(
        self,
        sources: Sequence[Source],
        key: str,
        limits: Limits | None = None,
        report: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._sources, self._key, self._limits, self._report = sources, key, limits or Limits(), report

    def __iter__(self) -> Iterator[str]:
        return (text for _, text in self.with_paths())

    def with_paths(self) -> Iterator[tuple[Path, str]]:
        """Each document behind the file that it came from."""
        line = done = 0
        for portion in cut(self._sources, START, self._limits, (self._key,), Budget(2**62)):
            for chunk in portion.chunks:
                line = line if chunk.start else 0
                line += yield from self._of_chunk(chunk, line)
                done += chunk.num_disk_bytes
                self._report(done)
        self._report(ALL)

    def _of_chunk(self, chunk: Chunk, line: int) -> Generator[tuple[Path, str], None, int]:
        content, too_long = read_content(chunk, self._limits, lambda: None)
        for _, text in content.texts(0, self._key):
            if isinstance(text, Reject):
                _refuse(chunk, line, content.located([text])[0])
            else:
                yield chunk.path, text
        for bad in too_long:
            _refuse(chunk, line, bad)
        return content.num_lines


def _refuse(chunk: Chunk, line: int, bad: Bad) -> None:
    place = where(chunk, line + bad.line + 1, bad)
    raise DataError(f"{place}: {bad.cause}. Repair or remove the line.")
