"""What a step's length depends on: from its last moment back, over the spans and ranks that were waited for.

Called by `lmtrain trace` and the report. On a rank the path goes from a span to the one before; where a span waited for
another rank, the path goes on there, at the moment that ended the wait. Shortening anything off the path gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtrain.observe.spans.format import Kind
from lmtrain.observe.timeline.merge import Segment
from lmtrain.observe.timeline.pieces import cut, waits
from lmtrain.observe.timeline.step_time import CLASSES, classes


@dataclass(frozen=True)
class Hop:
    """A piece of the path; the next one begins where and when this one ends, or on another rank then."""

    rank: int
    stage: int
    microbatch: int
    kind: str  # of the span, in words
    class_: str  # as in CLASSES
    begin_s: float  # from the path's beginning
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def critical_path(segment: Segment, step: int) -> list[Hop]:
    """In the order of time; nothing where no rank has the step."""
    segment = segment.only(step)
    spans = segment.spans
    steps = np.flatnonzero(spans["kind"] == Kind.STEP)
    if not steps.size:
        return []
    pieces, found = cut(segment), waits(segment)
    works, _ = classes(segment, pieces)
    ranks = spans["rank"][pieces.span]
    last = steps[np.argmax(spans["end_ns"][steps])]
    rank, now = int(spans["rank"][last]), int(spans["end_ns"][last])
    back: list[tuple[int, int, int]] = []  # piece, begin, end
    while True:
        low, high = np.searchsorted(ranks, [rank, rank + 1])
        at = int(low) + int(np.searchsorted(pieces.begin_ns[low:high], now)) - 1
        if at < low:
            break
        now = min(now, int(pieces.end_ns[at]))
        place = int(pieces.span[at])
        cause, until = int(found.cause[place]), int(found.until_ns[place])
        waited = cause >= 0 and pieces.begin_ns[at] < until < now
        begin = until if waited else int(pieces.begin_ns[at])
        back.append((at, begin, now))
        now = begin
        if waited:
            rank = int(spans["rank"][cause])
    start = back[-1][1]
    return [
        Hop(
            int(span["rank"]), int(span["stage"]), int(span["microbatch"]), Kind(span["kind"]).name.lower(),
            CLASSES[works[at]], (begin - start) / 1e9, (end - start) / 1e9,
        )
        for at, begin, end in reversed(back)
        for span in (spans[pieces.span[at]],)
    ]  # fmt: skip
