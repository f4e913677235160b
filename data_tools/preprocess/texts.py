"""All documents of some files, one by one, for who needs texts and no dataset. Called by `lmtrain tokenizer train`.

The first bad line stops with an error that says where and why.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from data_tools.preprocess.rejects import where
from data_tools.read.budget import Budget
from data_tools.read.documents import Bad, read_documents
from data_tools.read.pieces import START, Limits, Piece, cut
from data_tools.read.sources import Source
from lmtrain.errors import DataError
from lmtrain.tokenizer.json_lines import Reject


class Texts:
    """As often as one iterates."""

    def __init__(self, sources: Sequence[Source], key: str, limits: Limits | None = None) -> None:
        self._sources, self._key, self._limits = sources, key, limits or Limits()

    def __iter__(self) -> Iterator[str]:
        source, line = -1, 0
        for portion in cut(self._sources, START, self._limits, (self._key,), Budget(2**62)):
            for piece in portion.pieces:
                line = line if piece.source == source else 0
                source = piece.source
                line += yield from self._of_piece(piece, line)

    def _of_piece(self, piece: Piece, line: int) -> Generator[str, None, int]:
        documents, too_long = read_documents(piece, self._limits, lambda: None)
        for _, text in documents.texts(0, self._key):
            if isinstance(text, Reject):
                _refuse(piece, line, documents.located([text])[0])
            else:
                yield text
        for bad in too_long:
            _refuse(piece, line, bad)
        return documents.num_lines


def _refuse(piece: Piece, line: int, bad: Bad) -> None:
    place = where(piece.path, piece.kind, line + bad.line + 1, bad)
    raise DataError(f"{place}: {bad.cause}. Repair or remove the line.")
