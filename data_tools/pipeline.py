"""Text files to a dataset: workers encode portions, this process writes them in order. Called by `lmtrain preprocess`.

At most a few portions are in memory, however large the corpus; the output is the same, byte for byte, whatever the
number of workers, and appears only when it is whole.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from data_tools.encode import Encoded, Encoder, encode_portion, start_worker
from data_tools.sources import SLICE_BYTES, Slice, cut, find_sources
from lmtrain.data.format import SUFFIXES, DatasetWriter, dtype_for, part
from lmtrain.errors import DataError, OutOfMemoryError, UsageError
from lmtrain.tokenizer.base import Tokenizer

Progress = Callable[[int, int], None]  # source bytes done, of how many


@dataclass(frozen=True)
class Summary:
    num_documents: int
    num_tokens: int
    num_bytes: int  # of the texts
    seconds: float
    files: tuple[str, ...]

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / self.num_tokens


def preprocess(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    output: Path,
    *,
    workers: int = 1,
    key: str = "text",
    append_eod: bool | None = None,
    overwrite: bool = False,
    slice_bytes: int = SLICE_BYTES,
    progress: Progress | None = None,
) -> Summary:
    """Tokenize the inputs into the dataset `output`. append_eod=None: whenever the tokenizer has such a token."""
    began = time.perf_counter()
    append_eod = _whether_eod(tokenizer, append_eod)
    if workers < 1:
        raise UsageError(f"--workers={workers} must be at least 1. Leave it out to use every core.")
    sources = find_sources(inputs)
    total, done, num_bytes = sum(source.num_bytes for source in sources), 0, 0
    with DatasetWriter(output, dtype_for(tokenizer.vocab_size), overwrite=overwrite) as writer:
        for encoded in _encode(cut(sources, slice_bytes), tokenizer, workers, key, append_eod):
            lengths = encoded.lengths
            writer.add_documents(encoded.tokens, lengths[lengths > 0], (lengths > 0).astype(np.int64))
            num_bytes += encoded.num_text_bytes
            done += encoded.num_source_bytes
            if progress is not None:
                progress(done, total)
        if writer.num_tokens == 0:
            raise DataError(f"The {len(sources)} input files hold no text: every document is empty. Check the files.")
        writer.describe(
            tokenizer=tokenizer.to_bytes(),
            fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            num_bytes=num_bytes,
        )
    names = tuple(str(part(output, suffix)) for suffix in SUFFIXES)
    return Summary(writer.num_documents, writer.num_tokens, num_bytes, time.perf_counter() - began, names)


def _whether_eod(tokenizer: Tokenizer, asked: bool | None) -> bool:
    if asked and tokenizer.eod_id is None:
        raise UsageError("--append-eod needs an end-of-document token; the tokenizer has none. Use --no-append-eod.")
    return tokenizer.eod_id is not None if asked is None else asked


def _encode(
    portions: Iterable[list[Slice]], tokenizer: Tokenizer, workers: int, key: str, append_eod: bool
) -> Iterator[Encoded]:
    if workers == 1:
        yield from map(Encoder(tokenizer, key, append_eod).encode, portions)
        return
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), start_worker, (tokenizer.to_bytes(), key, append_eod)
    )  # because: a forked child would inherit threads' locks in whatever state they are
    running: deque[Future[Encoded]] = deque()
    try:
        for portion in portions:
            running.append(pool.submit(encode_portion, portion))
            if len(running) >= 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise OutOfMemoryError("A worker process was killed, most likely for memory. Use fewer --workers.") from error
    finally:
        pool.shutdown(cancel_futures=True)
