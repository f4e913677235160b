"""A rank's time, cut so that each moment belongs to one span: the innermost. And what that span waited for.

Called by step_time, critical_path and rows. A span that lies within another takes its time away from it, so that the
pieces of a step add up to the step. What runs beside the computation is left out: nothing waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.observe.spans.format import Flag, Kind
from lmtrain.observe.timeline.links import collectives, messages
from lmtrain.observe.timeline.merge import Segment
from lmtrain.observe.timeline.step_time import CLASSES, classes, waited_ns

_WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "input", Kind.WEIGHT: "weight"}


@dataclass(frozen=True)
class Bar:
    begin_s: float  # from the step's beginning on the first rank
    end_s: float
    what: str  # forward, backward, input, weight; else the class: pp, dp, tp, world, bubble, data, optimizer, other...
    microbatch: int  # -1: none


@dataclass(frozen=True)
class Row:
    rank: int
    stage: int  # -1: what belongs to none
    bars: tuple[Bar, ...]  # in the order of time, none above another


def timeline_rows(segment: Segment, step: int) -> list[Row]:
    """By rank and stage; a rank that has lost the step has no row."""
    segment = segment.only(step)
    spans, pieces, found = segment.spans, cut(segment), waits(segment)
    works, waiting = classes(segment, pieces)
    lost = waited_ns(pieces, found)
    began = int(pieces.begin_ns.min()) if pieces.span.size else 0
    rows: dict[tuple[int, int], list[Bar]] = {}
    for i, place in enumerate(pieces.span.tolist()):
        span, root = spans[place], spans[pieces.root[i]] if pieces.root[i] >= 0 else spans[place]
        stage = int(root["stage"] if root["kind"] in _WORDS or span["stage"] < 0 else span["stage"])
        if root["kind"] == Kind.SEND:  # because: it names the receiver's stage
            stage = -1
        begin, end = int(pieces.begin_ns[i]) - began, int(pieces.end_ns[i]) - began
        middle = begin + int(lost[i])
        what = CLASSES[works[i]]
        bars = rows.setdefault((int(span["rank"]), stage), [])
        microbatch = int(span["microbatch"] if span["microbatch"] >= 0 else root["microbatch"])
        if middle > begin:
            bars.append(Bar(begin / 1e9, middle / 1e9, "bubble" if waiting[i] else what, microbatch))
        if end > middle:
            bars.append(Bar(middle / 1e9, end / 1e9, _WORDS.get(Kind(span["kind"]), what), microbatch))
    return [Row(rank, stage, tuple(bars)) for (rank, stage), bars in sorted(rows.items())]


_END = int(np.iinfo(np.int64).max)

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Arrays of the same length, by rank and time; `span` and `root` are places in the segment's spans."""

    span: Ints
    root: Ints  # the outermost span, but for the step, that it lies in
    begin_ns: Ints
    end_ns: Ints

    def some(self, chosen: Any) -> Pieces:
        return Pieces(self.span[chosen], self.root[chosen], self.begin_ns[chosen], self.end_ns[chosen])


@dataclass(frozen=True)
class Waits:
    """Of each span of a segment: until when it waited for another rank, and for which span there (-1: none, or one
    that is not known)."""

    until_ns: Ints
    cause: Ints


def cut(segment: Segment) -> Pieces:
    chosen = np.flatnonzero(segment.spans["flags"] & Flag.ASIDE == 0)
    of = segment.spans[chosen]
    found: list[tuple[int, int, int, int]] = []
    open_: list[tuple[int, int, int]] = []  # place, end and root of the spans that lie around what comes next
    here, now = -1, 0

    def work_until(moment: int) -> None:
        """Whichever is the innermost has the time up to then."""
        nonlocal now
        while open_ and now < moment:
            place, end, root = open_[-1]
            until = min(end, moment)
            if until > now:
                found.append((place, root, now, until))
                now = until
            if end <= now:
                open_.pop()

    columns = (chosen, *(of[name] for name in ("rank", "kind", "begin_ns", "end_ns")))
    for place, rank, kind, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        work_until(_END if rank != here else begin)
        here, now = rank, begin
        root = open_[-1][2] if open_ and open_[-1][2] >= 0 else -1 if kind == Kind.STEP else place
        open_.append((place, end, root))
    work_until(_END)
    return Pieces(*np.array(found, np.int64).reshape(-1, 4).T)


def waits(segment: Segment) -> Waits:
    """A receive waits until its message is sent, a collective until its last member begins."""
    spans = segment.spans
    until, cause = spans["begin_ns"].copy(), np.full(spans.size, -1)
    receive = spans["kind"] == Kind.RECEIVE
    until[receive] = spans["end_ns"][receive]  # because: of a sender that is not known no more can be said
    sent, received = messages(spans)
    until[received], cause[received] = spans["begin_ns"][sent], sent

    place, which = collectives(spans, segment.layout)
    if place.size:
        begin, num = spans["begin_ns"][place], int(which.max()) + 1
        early = np.bincount(which, spans["flags"][place] & Flag.EARLY, num) > 0
        last = np.lexsort((begin, which))[np.cumsum(np.bincount(which, minlength=num)) - 1]  # member of each
        known = ~early[which] & (place != place[last][which])
        until[place[known]], cause[place[known]] = begin[last][which[known]], place[last][which[known]]
    until = np.clip(until, spans["begin_ns"], spans["end_ns"])
    cause[until <= spans["begin_ns"]] = -1
    return Waits(until, cause)
