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

from data_tools.corpus.flow.run_one_corpus_step_in_workers import (
    Documents,
    ReadOptions,
    SelectionStep,
    Tally,
    find_step_sources,
    read_documents,
)
from data_tools.corpus.flow.word_ngram_hashes import UNSPACED, Hashes, hash_runs, hash_words
from data_tools.read.compressed_and_parquet_readers import open_decompressed
from data_tools.read.find_input_files import SUFFIXES, known_suffix
from lmtrain.errors import DataError, UsageError, own
from lmtrain.tokenizer.text_from_json_lines import Document

NUM_WORDS, MIN_WORDS = 13, 8
SIDE_CHARS, MIN_CHARS, MAX_PIECES = 200, 200, 10
_MAX_BYTES = 1 << 30
ACTIONS = ("cut", "drop")
# Contractions are two words, because some evaluation texts are published tokenized that way: do n't, it 's.
_WORD = re.compile(
    rf"[{UNSPACED}]|n['\u2019]t\b|[^\W_{UNSPACED}]+?(?=n['\u2019]t\b)|[^\W_{UNSPACED}]+", re.IGNORECASE
)
_NOT_WORD = re.compile(r"[\W_]+")


@lru_cache(maxsize=1 << 18)
def plain_word(word: str) -> str:
    """Return a word in lower case and without punctuation."""
    return _NOT_WORD.sub("", word).lower()


def _hash_text(text: str) -> Hashes:
    """Return the hashes of a text's words, in order, without case and punctuation."""
    return hash_words([plain_word(word) for word in _WORD.findall(text)])


@dataclass(frozen=True)
class Passages:
    """Sequences of words in evaluation texts, which must not be trained on: for each length, sorted hashes and source
    files.
    """

    sources: tuple[str, ...]
    runs: tuple[tuple[int, Hashes, npt.NDArray[np.int32]], ...]  # (words, hashes, source numbers)

    def find(self, hashes: Hashes) -> list[tuple[int, int, int]]:
        """Return (first word, one past the last word, number of the evaluation file) for each sequence of words that a
        training text shares with an evaluation text. `hashes` are the hashes of the training text's words.
        """
        hits = []
        for length, run_hashes, sources in self.runs:
            runs = hash_runs(hashes, length)
            at = np.minimum(np.searchsorted(run_hashes, runs), run_hashes.size - 1)
            hits += [(i, i + length, int(sources[at[i]])) for i in np.flatnonzero(run_hashes[at] == runs).tolist()]
        return hits


def read_passages(files: Sequence[Path]) -> Passages:
    """Read evaluation files and hash all their sequences of 13 words; texts of 8 to 12 words are hashed whole. A plain
    text file is one text; in a .jsonl file, each string is a text of its own.
    """
    if not files:
        raise UsageError("--against was not given. Name the evaluation texts that must not be trained on.")
    by_length: dict[int, list[tuple[Hashes, int]]] = {}
    for number, path in enumerate(files):
        for text in _read_texts(path):
            hashes = _hash_text(unicodedata.normalize("NFC", text))
            length = min(NUM_WORDS, hashes.size)
            if length >= MIN_WORDS:
                by_length.setdefault(length, []).append((hash_runs(hashes, length), number))
    if not by_length:
        raise DataError(
            f"The files of --against ({files[0]}, ...) hold no text of {MIN_WORDS} or more words. Give other files."
        )
    return Passages(
        tuple(path.name for path in files),
        tuple(_sort_runs(length, runs) for length, runs in sorted(by_length.items())),
    )


def _sort_runs(length: int, runs: list[tuple[Hashes, int]]) -> tuple[int, Hashes, npt.NDArray[np.int32]]:
    """Join the hashes of word sequences of one length. Return (length, sorted distinct hashes, for each hash the number
    of the evaluation file where it first occurs). `runs` holds (hashes, file number) pairs.
    """
    hashes = np.concatenate([h for h, _ in runs])
    sources = np.concatenate([np.full(h.size, number, np.int32) for h, number in runs])
    distinct, first = np.unique(hashes, return_index=True)
    return length, distinct, sources[first]


def _read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of an evaluation file: the whole content of a plain text file, or every string in a file of JSON
    lines or Parquet rows.
    """
    if SUFFIXES.get(known_suffix(path), ("text", ""))[0] != "text":
        # because: evaluation files use various keys, and every string in them counts
        for _, document in read_documents(find_step_sources([path]), ReadOptions(key=None), lambda bad: None):
            yield from _iterate_strings(document)
        return
    with open_decompressed(path) as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise DataError(f"{path} is larger than 1 GiB, too large for a plain text of --against. Give another file.")
    try:
        yield data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}. Give the text as it was published.") from error


def _iterate_strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _iterate_strings(inner)


@dataclass(frozen=True)
class DecontaminateStep(SelectionStep):
    """The step `decontaminate`: cuts out sequences of words that occur in evaluation texts, or drops documents with
    any.
    """

    passages: Passages
    action: str = "cut"
    name: ClassVar[str] = "decontaminate"

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise UsageError(f"--action={self.action} is unknown. Use {' or '.join(map(own, ACTIONS))}.")

    def select_documents(self, documents: Documents, key: str, tally: Tally) -> Iterator[Document]:
        for _, document in documents:
            text = unicodedata.normalize("NFC", document[key])
            hits = self.passages.find(_hash_text(text))
            if not hits:
                yield document
                continue
            for source in sorted({source for _, _, source in hits}):
                tally.changed[f"found: {self.passages.sources[source]}"] += 1
            pieces = self._remaining_pieces(text, hits)
            if not pieces:
                tally.drop("contaminated")
                continue
            tally.changed["passages cut out"] += 1
            tally.changed["pieces added"] += len(pieces) - 1
            yield from (document | {key: piece, "piece": number} for number, piece in enumerate(pieces))

    def _remaining_pieces(self, text: str, hits: list[tuple[int, int, int]]) -> list[str]:
        """Return the pieces of a document that remain after the word sequences in `hits` and 200 characters on each
        side are cut out; return none if the whole document is to be dropped. A hit is (first word, one past the last
        word, number of the evaluation file).
        """
        if self.action == "drop":
            return []
        spans = [match.span() for match in _WORD.finditer(text)]
        holes = merge_spans((spans[a][0] - SIDE_CHARS, spans[b - 1][1] + SIDE_CHARS) for a, b, _ in hits)
        edges = [0, *(max(0, min(edge, len(text))) for hole in holes for edge in hole), len(text)]
        if len(edges) // 2 > MAX_PIECES:
            return []
        pieces = [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        return [piece for piece in pieces if len(piece.strip()) >= MIN_CHARS]


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans (start, end) that touch or overlap, and return the resulting spans in ascending order."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result
