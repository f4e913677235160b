"""What a document becomes: one sequence of ids, or one for each sentence. Called by workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_tools.preprocess.sentences import split_sentences
from data_tools.read.content import Content
from lmtrain.tokenizer.fast import Encoder
from lmtrain.tokenizer.json_lines import Reject


@dataclass
class Batch:
    """Documents of one key: ids end to end, the length of each sequence, how many sequences each document has."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    num_sequences: NDArray[np.int64]
    num_text_bytes: int
    rejects: list[Reject]  # documents that are not here, in order

    def document_lengths(self) -> NDArray[np.int64]:
        ends = np.concatenate(([0], np.cumsum(self.lengths)))
        return np.diff(ends[np.concatenate(([0], np.cumsum(self.num_sequences)))])

    def only(self, kept: NDArray[np.bool_], num_text_bytes: int) -> Batch:
        of_sequences = np.repeat(kept, self.num_sequences)
        tokens = self.tokens[np.repeat(of_sequences, self.lengths)]
        return Batch(tokens, self.lengths[of_sequences], self.num_sequences[kept], num_text_bytes, self.rejects)


ToSequences = Callable[[Content, int, str], Batch]  # what holds the documents, and the number and name of the key


@dataclass(frozen=True)
class Whole:
    """One sequence a document, and none for an empty one."""

    encoder: Encoder
    append_eod: bool

    def __call__(self, content: Content, number: int, key: str) -> Batch:
        found = content.encode(self.encoder, number, key, self.append_eod)
        filled = found.lengths > 0
        return Batch(
            found.tokens, found.lengths[filled], filled.astype(np.int64), found.num_text_bytes, found.rejects
        )


@dataclass(frozen=True)
class Sentences:
    """One sequence a sentence; the end of the document, if wanted, is behind its last."""

    encoder: Encoder
    eod_id: int | None
    newlines: bool = False  # a line ends a sentence too

    def __call__(self, content: Content, number: int, key: str) -> Batch:
        rejects: list[Reject] = []
        sentences: list[str] = []
        counts, num_text_bytes = [], 0
        for _, text in content.texts(number, key):
            if isinstance(text, Reject):
                rejects.append(text)
                continue
            split = split_sentences(text, self.newlines)
            sentences += split
            counts.append(len(split))
            num_text_bytes += len(text.encode())
        found = self.encoder.encode_documents(sentences)
        num_sequences = _filled(found.lengths, np.array(counts, np.int64))
        tokens, lengths = found.tokens, found.lengths[found.lengths > 0]
        if self.eod_id is not None:
            last = np.cumsum(num_sequences)[num_sequences > 0] - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self.eod_id)
            lengths[last] += 1
        return Batch(tokens, lengths, num_sequences, num_text_bytes, rejects)


def _filled(lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many sequences of each document have ids."""
    filled = np.concatenate(([0], np.cumsum(lengths > 0)))
    return np.diff(filled[np.concatenate(([0], np.cumsum(counts)))])
