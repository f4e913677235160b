"""The step `decontaminate`: passages of evaluation texts are taken out of the training text.

After the description in GPT-3's report: texts become words without case and punctuation, and a run of 13 words that
stands in an evaluation text marks its place. Either the whole document goes, or the run with 200 characters on each
side: what is left becomes documents of its own, pieces under 200 characters are dropped, and a document in more than
ten pieces goes whole. Evaluation texts of 8 to 12 words are looked for whole. Called by `lmtrain corpus decontaminate`.
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

from data_tools.corpus.flow.reading import Documents, Reading, find_files, read_documents, to_line
from data_tools.corpus.flow.steps import Tally
from data_tools.corpus.flow.words import UNSPACED, Hashes, hash_runs, hash_words
from data_tools.corpus.flow.words import shingles as shingles_of
from data_tools.read.sources import SUFFIXES
from data_tools.read.streams import unpacked
from lmtrain.errors import DataError, UsageError

NUM_WORDS, LEAST_WORDS = 13, 8
SIDE_CHARS, LEAST_CHARS, MOST_PIECES = 200, 200, 10
_MOST_BYTES = 1 << 30
ACTIONS = ("cut", "drop")
# Contractions are two words, cut as the tokenizers cut with which some evaluation texts are published: do n't, it 's.
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
    """The runs of words that must not be trained on: for each length, sorted hashes and which file each is from."""

    sources: tuple[str, ...]
    runs: tuple[tuple[int, Hashes, npt.NDArray[np.int32]], ...]  # (words, hashes, source numbers)

    def find(self, hashes: Hashes) -> list[tuple[int, int, int]]:
        """(first word, one past the last, source) of every run that is found."""
        found = []
        for length, known, sources in self.runs:
            wanted = hash_runs(hashes, length)
            at = np.minimum(np.searchsorted(known, wanted), known.size - 1)
            hits = np.flatnonzero(known[at] == wanted)
            found += [(int(i), int(i) + length, int(sources[at[i]])) for i in hits]
        return found


def read_passages(files: Sequence[Path]) -> Passages:
    """Every run of the evaluation files: .txt and other plain text as one, .jsonl by its strings. May be compressed."""
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
    runs = tuple(_sorted(length, found) for length, found in sorted(by_length.items()))
    return Passages(tuple(path.name for path in files), runs)


def _sorted(length: int, runs: list[tuple[Hashes, int]]) -> tuple[int, Hashes, npt.NDArray[np.int32]]:
    hashes = np.concatenate([h for h, _ in runs])
    sources = np.concatenate([np.full(h.size, number, np.int32) for h, number in runs])
    known, first = np.unique(hashes, return_index=True)
    return length, known, sources[first]


def _texts(path: Path) -> Iterator[str]:
    if next((kind for suffix, (kind, _) in SUFFIXES.items() if path.name.endswith(suffix)), "text") != "text":
        # because: an evaluation file has keys of its own, and every text in it counts
        for _, document in read_documents(find_files([path]), Reading(key=None), lambda bad: None):
            yield from _strings(document)
        return
    with unpacked(path) as file:
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
class Decontaminate:
    passages: Passages
    action: str = "cut"
    name: ClassVar[str] = "decontaminate"
    files: ClassVar[Sequence[str]] = ("documents",)

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise UsageError(f"--action={self.action} is nothing to do. Use {' or '.join(ACTIONS)}.")

    def run(self, documents: Documents, key: str, tally: Tally) -> dict[str, bytes]:
        lines = []
        for _, document in documents:
            text = unicodedata.normalize("NFC", document[key])
            found = self.passages.find(_hashes(text))
            if not found:
                tally.keep(document[key])
                lines.append(to_line(document))
                continue
            for source in sorted({source for _, _, source in found}):
                tally.changed[f"found: {self.passages.sources[source]}"] += 1
            pieces = self._pieces(text, found)
            if not pieces:
                tally.drop("contaminated")
                continue
            tally.changed["passages cut out"] += 1
            tally.changed["pieces added"] += len(pieces) - 1
            for number, piece in enumerate(pieces):
                tally.keep(piece)
                lines.append(to_line(document | {key: piece, "piece": number}))
        return {"documents": b"".join(lines)}

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
    """Spans that touch or overlap, as one."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


SHINGLE_WORDS = 8
# because: over the standard library, 7 in 10 files share less than 0.05 with any one other file, and what they share is
# licence, imports and idiom. Above 0.2 stand the texts that were written by copying (bz2 and lzma, wave and aifc, the
# MIME types, the codecs). One word in six changed at random still leaves 0.23.
NEAR_COPY = 0.2


def shingles(text: str, words: int = SHINGLE_WORDS) -> Hashes:
    """The sorted distinct hashes of every run of `words` words; a shorter text is one single shingle."""
    return shingles_of(text, words)


@dataclass(frozen=True)
class Overlap:
    """How much of one text stands in the others."""

    largest: float  # share of its shingles found in the one other text that holds most of them
    nearest: int  # which text that is; -1 when nothing is shared
    anywhere: float  # share of its shingles found in any of the others


def overlaps(sets: Sequence[Hashes], subjects: Sequence[int]) -> list[Overlap]:
    """Compare each text of `subjects` (indices into `sets`) with all the other texts."""
    sizes = np.array([s.size for s in sets], dtype=np.int64)
    owners = np.repeat(np.arange(len(sets)), sizes)
    everything = np.concatenate(sets) if len(sets) else np.zeros(0, dtype=np.uint64)
    order = np.argsort(everything, kind="stable")
    everything, owners = everything[order], owners[order]
    return [_overlap(sets[subject], subject, everything, owners, len(sets)) for subject in subjects]


def _overlap(
    wanted: Hashes, subject: int, everything: Hashes, owners: npt.NDArray[np.int64], num_texts: int
) -> Overlap:
    if wanted.size == 0:
        return Overlap(largest=0.0, nearest=-1, anywhere=0.0)
    first = np.searchsorted(everything, wanted, side="left")
    count = np.searchsorted(everything, wanted, side="right") - first
    # every index first[i] .. first[i] + count[i] in one array: the texts that hold shingle i, itself among them
    rows = np.repeat(first - np.concatenate(([0], np.cumsum(count)[:-1])), count) + np.arange(count.sum())
    shared = np.bincount(owners[rows], minlength=num_texts)
    shared[subject] = 0
    nearest = int(shared.argmax())
    return Overlap(
        largest=float(shared[nearest] / wanted.size),
        nearest=nearest if shared[nearest] else -1,
        anywhere=float((count > 1).mean()),  # a set holds a hash once, so more than one holder means another text
    )
