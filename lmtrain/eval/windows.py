"""Which tokens of a long sequence are fed together, and which of them each window scores. Pure numpy, no torch.

Called by the tasks. Knows no text, no model and no protocol names; the property everything rests on is that each
target is scored exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


def windows(num_tokens: int, seq_len: int, stride: int) -> Iterator[Window]:
    """Window i feeds seq_len tokens from i * stride on; the first scores all targets, others their last `stride`.

    With stride 32 this is Megatron's overlapping evaluation, less its trailing windows that hold nothing but padding;
    with stride = seq_len the windows are disjoint. Every target 1..num_tokens-1 is scored exactly once.
    """
    if not 1 <= stride <= seq_len:
        raise UsageError(
            f"A stride of {stride} does not fit seq_len={seq_len}: targets would be skipped. Use 1 to {seq_len}."
        )
    start, first_scored = 0, 1
    while first_scored < num_tokens:
        stop = min(start + seq_len, num_tokens - 1)
        yield Window(start, stop, first_scored)
        start, first_scored = start + stride, stop + 1


@dataclass(frozen=True)
class WindowedRequests:
    """The requests of many sequences, an item each, made while they are read; may be walked more than once."""

    sequences: Iterable[Tokens]
    seq_len: int
    stride: int

    def __iter__(self) -> Iterator[Request]:
        for item, tokens in enumerate(self.sequences):
            for window in windows(len(tokens), self.seq_len, self.stride):
                yield Request(tokens[window.start : window.stop + 1], window.stop + 1 - window.first_scored, item)
