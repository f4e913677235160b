"""A step as rows of bars, one for each rank and stage: a picture of what ran when. Called by views and the report."""

from __future__ import annotations

from dataclasses import dataclass

from lmtrain.observe.spans.format import Kind
from lmtrain.observe.timeline.merge import Segment
from lmtrain.observe.timeline.pieces import cut, waits
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
