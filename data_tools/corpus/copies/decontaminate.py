"""The step `decontaminate`: removes passages of evaluation texts from the training text.

Follows the description in GPT-3's report: texts become words without case and punctuation, and a run of 13 words that
occurs in an evaluation text is a hit. Either the whole document is dropped, or the run with 200 characters on each side
is cut out: the remaining pieces become documents, pieces under 200 characters are dropped, and a document in more than
ten pieces is dropped whole. Evaluation texts of 8 to 12 words must match as a whole. Called by `lmtrain corpus
decontaminate`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from data_tools.corpus.flow.steps import Documents, Reading, Selection, Tally, find_files, read_documents
from data_tools.corpus.flow.word_hashes import UNSPACED, Hashes, hash_runs, hash_words
from data_tools.read.sources import SUFFIXES
from data_tools.read.streams import open_decompressed
from lmtrain.errors import DataError, UsageError
from lmtrain.tokenizer.json_lines import Document

NUM_WORDS, LEAST_WORDS = 13, 8
SIDE_CHARS, LEAST_CHARS, MOST_PIECES = 200, 200, 10
_MOST_BYTES = 1 << 30
ACTIONS = ("cut", "drop")
# Contractions are two words, because some evaluation texts are published tokenized that way: do n't, it 's.
_WORD = re.compile(
    rf"[{UNSPACED}]|n['\u2019]t\b|[^\W_{UNSPACED}]+?(?=n['\u2019]t\b)|[^\W_{UNSPACED}]+", re.IGNORECASE
)
_NOT_WORD = re.compile(r"[\W_]+")


@lru_cache(maxsize=1 << 18)
def plain_word(word: str) -> str:
    return _NOT_WORD.sub("", word).lower()


def _hashes(text: str) -> Hashes:
    return hash_words([plain_word(word) for word in _WORD.findall(text)])


@dataclass(frozen=True)
class Passages:
    """Runs of words that must not be trained on: for each length, sorted hashes and the source file of each."""

    sources: tuple[str, ...]
    runs: tuple[tuple[int, Hashes, npt.NDArray[np.int32]], ...]  # (words, hashes, source numbers)

    def find(self, hashes: Hashes) -> list[tuple[int, int, int]]:
        """Return (first word, one past the last, source) of every hit."""
        found = []
        for length, known, sources in self.runs:
            wanted = hash_runs(hashes, length)
            at = np.minimum(np.searchsorted(known, wanted), known.size - 1)
            found += [(i, i + length, int(sources[at[i]])) for i in np.flatnonzero(known[at] == wanted).tolist()]
        return found


def read_passages(files: Sequence[Path]) -> Passages:
    """Read the runs of the evaluation files, compressed or not: plain text is one text, a string of .jsonl is one."""
    if not files:
        raise UsageError("--against was not given. Name the evaluation texts that must not be trained on.")
    by_length: dict[int, list[tuple[Hashes, int]]] = {}
    for number, path in enumerate(files):
        for text in _texts(path):
            hashes = _hashes(unicodedata.normalize("NFC", text))
            length = min(NUM_WORDS, hashes.size)
            if length >= LEAST_WORDS:
                by_length.setdefault(length, []).append((hash_runs(hashes, length), number))
    if not by_length:
        raise DataError(f"{files[0]} and the rest hold no run of {LEAST_WORDS} words. Check the evaluation texts.")
    return Passages(
        tuple(path.name for path in files),
        tuple(_sorted(length, found) for length, found in sorted(by_length.items())),
    )


def _sorted(length: int, runs: list[tuple[Hashes, int]]) -> tuple[int, Hashes, npt.NDArray[np.int32]]:
    hashes = np.concatenate([h for h, _ in runs])
    sources = np.concatenate([np.full(h.size, number, np.int32) for h, number in runs])
    known, first = np.unique(hashes, return_index=True)
    return length, known, sources[first]


def _texts(path: Path) -> Iterator[str]:
    if next((kind for suffix, (kind, _) in SUFFIXES.items() if path.name.endswith(suffix)), "text") != "text":
        # because: evaluation files use various keys, and every string in them counts
        for _, document in read_documents(find_files([path]), Reading(key=None), lambda bad: None):
            yield from _strings(document)
        return
    with open_decompressed(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise DataError(f"{path} is larger than 1 GiB, which no evaluation set is. Check --against.")
    try:
        yield data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}. Give the text as it was published.") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


@dataclass(frozen=True)
class Decontaminate(Selection):
    """The step `decontaminate`: cuts hits out of documents, or drops documents with hits."""

    passages: Passages
    action: str = "cut"
    name: ClassVar[str] = "decontaminate"

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise UsageError(f"--action={self.action} is nothing to do. Use {' or '.join(ACTIONS)}.")

    def kept(self, documents: Documents, key: str, tally: Tally) -> Iterator[Document]:
        for _, document in documents:
            text = unicodedata.normalize("NFC", document[key])
            found = self.passages.find(_hashes(text))
            if not found:
                yield document
                continue
            for source in sorted({source for _, _, source in found}):
                tally.changed[f"found: {self.passages.sources[source]}"] += 1
            pieces = self._pieces(text, found)
            if not pieces:
                tally.drop("contaminated")
                continue
            tally.changed["passages cut out"] += 1
            tally.changed["pieces added"] += len(pieces) - 1
            yield from (document | {key: piece, "piece": number} for number, piece in enumerate(pieces))

    def _pieces(self, text: str, found: list[tuple[int, int, int]]) -> list[str]:
        if self.action == "drop":
            return []
        spans = [match.span() for match in _WORD.finditer(text)]
        holes = merged((spans[a][0] - SIDE_CHARS, spans[b - 1][1] + SIDE_CHARS) for a, b, _ in found)
        edges = [0, *(max(0, min(edge, len(text))) for hole in holes for edge in hole), len(text)]
        if len(edges) // 2 > MOST_PIECES:
            return []
        pieces = [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        return [piece for piece in pieces if len(piece.strip()) >= LEAST_CHARS]


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans with touching or overlapping spans joined, in ascending order."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result
