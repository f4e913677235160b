"""Cutting of token sequences into windows, and the choice of the targets each scores. Pure numpy, no torch.

Called by the tasks. Independent of texts, models and protocols. Each target is scored exactly once, and all evaluations
rely on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import UsageError, way

Tokens = NDArray[np.integer[Any]]


class Window(NamedTuple):
    """A window that feeds tokens[start:stop], predicts tokens[start + 1:stop + 1] and scores from `first_scored` on."""

    start: int
    stop: int
    first_scored: int


@dataclass(frozen=True)
class Request:
    """A sequence of tokens to score: tokens[:-1] are fed, tokens[1:] are the targets, of which the last `num_scored`
    count.
    """

    tokens: Tokens
    num_scored: int
    item: int = 0  # index of its document, line or question
    weight: float = 1.0  # of each target, for protocols that weigh them

    @property
    def num_fed(self) -> int:
        return len(self.tokens) - 1

    @property
    def key(self) -> bytes:
        """The bytes that determine the answer. They leave out `num_scored`, because the answer for fewer targets is the
        end of the answer for more.
        """
        return self.tokens.astype("<i8").tobytes()


@dataclass(frozen=True)
class MaskedRequest(Request):
    """A request for a model that sees both sides. `tokens` holds the tokens fed, and after them the targets.

    The targets are the original tokens at `places`, or without `places` the label of the pair of `segments`.
    """

    places: NDArray[np.int64] | None = None
    segments: NDArray[np.int64] | None = None

    @property
    def num_fed(self) -> int:
        return len(self.tokens) - self.num_scored

    @property
    def key(self) -> bytes:
        arrays = [super().key]
        arrays += [array.astype("<i8").tobytes() for array in (self.places, self.segments) if array is not None]
        return b"".join([*(len(array).to_bytes(8, "little") for array in arrays), *arrays])


def windows(num_tokens: int, seq_len: int, stride: int, *, last_looks_back: bool = False) -> Iterator[Window]:
    """Yield windows over a sequence of `num_tokens` tokens. Window i feeds up to `seq_len` tokens to the model, from
    token i * `stride` on, and scores the targets (next tokens) that no earlier window scores. With `last_looks_back`
    the last window starts earlier, so that it is as long as the others.

    The first window scores all its targets, the others their last `stride`. With stride 32 this is Megatron's
    overlapping evaluation, without its trailing windows of padding only; with stride = seq_len the windows are
    disjoint. Every target 1..num_tokens-1 is scored exactly once. `last_looks_back` is what lm-evaluation-harness does.
    """
    check_stride(seq_len, stride)
    start, first_scored = 0, 1
    while first_scored < num_tokens:
        stop = min(start + seq_len, num_tokens - 1)
        yield Window(max(stop - seq_len, 0) if last_looks_back else start, stop, first_scored)
        start, first_scored = start + stride, stop + 1


def check_stride(seq_len: int, stride: int) -> None:
    """Raise UsageError unless `stride` is from 1 to `seq_len`; with a longer stride, targets between windows would be
    skipped.
    """
    if not 1 <= stride <= seq_len:
        raise UsageError(
            f"A stride of {stride} does not fit seq_len={seq_len}: it would skip targets. Use "
            f"{way('--stride', str(seq_len))} or less."
        )


@dataclass(frozen=True)
class WindowedRequests:
    """The requests of many sequences, an item each, made during iteration; may be iterated more than once."""

    sequences: Iterable[Tokens]
    seq_len: int
    stride: int
    last_looks_back: bool = False

    def __iter__(self) -> Iterator[Request]:
        for item, tokens in enumerate(self.sequences):
            for window in windows(len(tokens), self.seq_len, self.stride, last_looks_back=self.last_looks_back):
                yield Request(tokens[window.start : window.stop + 1], window.stop + 1 - window.first_scored, item)


@dataclass(frozen=True)
class StreamRequests:
    """The requests of one sequence of several items. A window with targets of two items becomes two requests.

    The first of these ends where its item ends, so that each target has the same context as in the whole window.
    """

    tokens: Tokens
    items: NDArray[np.int64]  # item of each token
    windows: Sequence[Window]
    weights: Sequence[float] | None = None  # weight of each window's targets

    def __iter__(self) -> Iterator[Request]:
        for window, weight in zip(self.windows, self.weights or repeat(1.0), strict=False):
            begin, end = window.first_scored, window.stop + 1
            changes = np.flatnonzero(np.diff(self.items[begin:end])) + begin + 1
            for first, last in pairwise([begin, *changes.tolist(), end]):
                yield Request(self.tokens[window.start : last], last - first, int(self.items[first]), weight)
