"""Which tokens of a long sequence are fed together, and which of them each window scores. Pure numpy, no torch.

Called by the tasks. Knows no text, no model and no protocol names; the property everything rests on is that each
target is scored exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import UsageError

Tokens = NDArray[np.integer[Any]]


class Window(NamedTuple):
    """Feeds tokens[start:stop] and predicts tokens[start + 1:stop + 1]; scores the targets from `first_scored` on."""

    start: int
    stop: int
    first_scored: int


@dataclass(frozen=True)
class Request:
    """A piece to score: tokens[:-1] are fed, tokens[1:] are the targets, and the last `num_scored` of these count."""

    tokens: Tokens
    num_scored: int
    item: int = 0  # the document, line or question that it belongs to
    weight: float = 1.0  # of each of its targets, to the protocols that weigh them

    @property
    def num_fed(self) -> int:
        return len(self.tokens) - 1

    @property
    def key(self) -> bytes:
        """What the answer depends on, but for how many targets count: an answer to fewer is the end of one to more."""
        return self.tokens.astype("<i8").tobytes()


@dataclass(frozen=True)
class MaskedRequest(Request):
    """For a model that sees both sides: what is fed and, behind it in `tokens`, what is to be predicted of it.

    That is the tokens which stood at `places`, or, where there are none, the label of the pair that `segments` are.
    """

    places: NDArray[np.int64] | None = None
    segments: NDArray[np.int64] | None = None

    @property
    def num_fed(self) -> int:
        return len(self.tokens) - self.num_scored

    @property
    def key(self) -> bytes:
        others = (one.astype("<i8").tobytes() for one in (self.places, self.segments) if one is not None)
        arrays = [super().key, *others]
        return b"".join([*(len(one).to_bytes(8, "little") for one in arrays), *arrays])


def windows(num_tokens: int, seq_len: int, stride: int, *, last_looks_back: bool = False) -> Iterator[Window]:
    """Window i feeds seq_len tokens from i * stride on; the first scores all targets, others their last `stride`.

    With stride 32 this is Megatron's overlapping evaluation, less its trailing windows that hold nothing but padding;
    with stride = seq_len the windows are disjoint. Every target 1..num_tokens-1 is scored exactly once.
    `last_looks_back`: the last window feeds seq_len tokens too, as lm-evaluation-harness's does.
    """
    refuse_stride(seq_len, stride)
    start, first_scored = 0, 1
    while first_scored < num_tokens:
        stop = min(start + seq_len, num_tokens - 1)
        yield Window(max(stop - seq_len, 0) if last_looks_back else start, stop, first_scored)
        start, first_scored = start + stride, stop + 1


def refuse_stride(seq_len: int, stride: int) -> None:
    if not 1 <= stride <= seq_len:
        raise UsageError(
            f"A stride of {stride} does not fit seq_len={seq_len}: targets would be skipped. Use 1 to {seq_len}."
        )


@dataclass(frozen=True)
class WindowedRequests:
    """The requests of many sequences, an item each, made while they are read; may be walked more than once."""

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
    """The requests of one sequence of several items; a window that scores targets of two items is two requests.

    The first of the two ends where its item ends, so that each target still sees what it would see in one.
    """

    tokens: Tokens
    items: NDArray[np.int64]  # of each token
    windows: Sequence[Window]
    weights: Sequence[float] | None = None  # of each window's targets

    def __iter__(self) -> Iterator[Request]:
        for window, weight in zip(self.windows, self.weights or repeat(1.0), strict=False):
            begin, end = window.first_scored, window.stop + 1
            changes = np.flatnonzero(np.diff(self.items[begin:end])) + begin + 1
            for first, last in pairwise([begin, *changes.tolist(), end]):
                yield Request(self.tokens[window.start : last], last - first, int(self.items[first]), weight)
