"""What one worker does: a portion of text files to token ids. Called by pipeline.py, in this process or in others.

A worker loads its tokenizer once. What it returns depends on its portion alone, so that the output is the same
whatever the number of workers.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_tools.sources import Slice, read_texts
from lmtrain.data.format import dtype_for
from lmtrain.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """The documents of a portion: ids end to end, and how many of them each document has."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    num_text_bytes: int
    num_source_bytes: int


class Encoder:
    def __init__(self, tokenizer: Tokenizer, key: str, append_eod: bool) -> None:
        self._tokenizer, self._key = tokenizer, key
        self._eod = [tokenizer.eod_id] if append_eod and tokenizer.eod_id is not None else []
        self._dtype = dtype_for(tokenizer.vocab_size)

    def encode(self, portion: list[Slice]) -> Encoded:
        arrays: list[NDArray[Any]] = [np.empty(0, self._dtype)]
        lengths: list[int] = []
        num_text_bytes = 0
        for piece in portion:
            for text in read_texts(piece, self._key):
                num_text_bytes += len(text.encode())
                before = len(arrays)
                arrays.extend(np.array(self._tokenizer.encode(part), self._dtype) for part in self._tokenizer.cut(text))
                length = sum(len(array) for array in arrays[before:])
                if length and self._eod:  # because: an empty document stays empty in this format, without an end
                    arrays.append(np.array(self._eod, self._dtype))
                    length += len(self._eod)
                lengths.append(length)
        num_source_bytes = sum(piece.stop - piece.start for piece in portion)
        return Encoded(np.concatenate(arrays), np.array(lengths, np.int64), num_text_bytes, num_source_bytes)


_encoder: Encoder | None = None  # of this worker process


def start_worker(tokenizer: bytes, key: str, append_eod: bool) -> None:
    """Runs first in every worker process."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(Tokenizer.from_bytes(tokenizer), key, append_eod)


def encode_portion(portion: list[Slice]) -> Encoded:
    assert _encoder is not None, "start_worker runs first"
    return _encoder.encode(portion)


def _end_with_parent() -> None:
    # because: the workers of a killed pool hold both ends of its pipes and would wait for ever
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
