"""The time of each rank's steps by class; the classes of a step add up to the step.

Called by `lmtrain trace` and by heat. `bubble` is the time that a pipeline rank waits before its message is sent, and
before the last rank reaches a collective over stages; `pp` is the transfer time of messages. A collective over tp or dp
counts as a whole, and `waited` is the part of it spent waiting for a slower member.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.layout import Coordinate
from lmtrain.observe.spans.format import Axis, Flag, Kind
from lmtrain.observe.timeline.merge import Segment, collectives, messages

_END = int(np.iinfo(np.int64).max)

Ints = NDArray[np.int64]
CLASSES = ("compute", "pp", "dp", "tp", "world", "bubble", "data", "optimizer", "save", "measuring", "other")
COMPUTE, MESSAGES, BUBBLE, OPTIMIZER = (CLASSES.index(word) for word in ("compute", "pp", "bubble", "optimizer"))
_OF_KIND = {
    Kind.STEP: "other", Kind.DATA: "data", Kind.FORWARD: "compute", Kind.BACKWARD: "compute", Kind.INPUT: "compute",
    Kind.WEIGHT: "compute", Kind.COLLECTIVE: "world", Kind.SEND: "pp", Kind.RECEIVE: "pp", Kind.OPTIMIZER: "optimizer",
    Kind.SAVE: "save", Kind.VALIDATION: "measuring", Kind.EVALUATION: "measuring", Kind.OTHER: "other",
}  # fmt: skip
_OF_AXIS = {
    Axis.NONE: "other", Axis.PP: "pp", Axis.DP: "dp", Axis.DP_REPLICATE: "dp", Axis.DP_SHARD: "dp", Axis.TP: "tp",
    Axis.PLANE: "world", Axis.WORLD: "world",
}  # fmt: skip
_WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "input", Kind.WEIGHT: "weight"}
_WHOLE = np.array([Kind.SAVE, Kind.VALIDATION, Kind.EVALUATION])  # kinds that include all spans inside them


@dataclass(frozen=True)
class Pieces:
    """Intervals in which one span is the innermost: arrays of equal length, by rank and time.

    `span` and `root` are indices into the segment's spans.
    """

    span: Ints
    root: Ints  # the outermost span around it, except the step's
    begin_ns: Ints
    end_ns: Ints

    def some(self, chosen: Any) -> Pieces:
        return Pieces(self.span[chosen], self.root[chosen], self.begin_ns[chosen], self.end_ns[chosen])


@dataclass(frozen=True)
class Waits:
    """Per span: the end of its wait for another rank, and the index of the span waited for (-1: none or unknown)."""

    until_ns: Ints
    cause: Ints


def cut(segment: Segment) -> Pieces:
    chosen = np.flatnonzero(segment.spans["flags"] & Flag.ASIDE == 0)
    of = segment.spans[chosen]
    found: list[tuple[int, int, int, int]] = []
    open_: list[tuple[int, int, int]] = []  # (index, end, root) of the spans around the current time
    here, now = -1, 0

    def work_until(moment: int) -> None:
        """Assign the time up to `moment` to the innermost open spans."""
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
    """Return all waits: a receive waits until its message is sent, a collective until its last member begins."""
    spans = segment.spans
    until, cause = spans["begin_ns"].copy(), np.full(spans.size, -1)
    receive = spans["kind"] == Kind.RECEIVE
    until[receive] = spans["end_ns"][receive]  # because: without the sender's record all of it counts as waiting
    sent, received = messages(spans)
    until[received], cause[received] = spans["begin_ns"][sent], sent

    place, which = collectives(spans, segment.layout)
    if place.size:
        begin, num = spans["begin_ns"][place], int(which.max()) + 1
        early = np.bincount(which, spans["flags"][place] & Flag.EARLY, num) > 0
        last = np.lexsort((begin, which))[np.cumsum(np.bincount(which, minlength=num)) - 1]  # last member of each
        known = ~early[which] & (place != place[last][which])
        until[place[known]], cause[place[known]] = begin[last][which[known]], place[last][which[known]]
    until = np.clip(until, spans["begin_ns"], spans["end_ns"])
    cause[until <= spans["begin_ns"]] = -1
    return Waits(until, cause)


@dataclass(frozen=True)
class StepTimes:
    """Step times in seconds, [step, rank, class]; NaN where a rank has no whole record of a step."""

    steps: list[int]
    ranks: list[int]
    seconds: NDArray[np.float64]
    waited: NDArray[np.float64]  # the part of `seconds` spent waiting for another rank

    def mean(self) -> dict[str, float]:
        """Return mean seconds per class over all steps and ranks; the classes add up to the mean step time."""
        return dict(zip(CLASSES, np.nanmean(self.seconds, axis=(0, 1)).tolist(), strict=True))

    def mean_waited(self) -> dict[str, float]:
        return dict(zip(CLASSES, np.nanmean(self.waited, axis=(0, 1)).tolist(), strict=True))

    def by_rank(self) -> NDArray[np.float64]:
        """Return [rank, class]: means over the steps; NaN for a rank without a whole step."""
        num = np.sum(~np.isnan(self.seconds), axis=0)
        return np.where(num > 0, np.nansum(self.seconds, axis=0) / np.maximum(num, 1), np.nan)


def step_times(segment: Segment) -> StepTimes:
    spans, steps, ranks = segment.spans, np.array(segment.steps), np.array(segment.ranks)
    shape = (steps.size, ranks.size, len(CLASSES))
    seconds, waited = np.zeros(shape), np.zeros(shape)
    step = spans[spans["kind"] == Kind.STEP]
    present = np.zeros(shape[:2], bool)
    present[np.searchsorted(steps, step["step"]), np.searchsorted(ranks, step["rank"])] = True
    pieces, found = cut(segment), waits(segment)
    inside = _within_steps(segment, pieces)
    pieces, step_of = pieces.some(inside >= 0), inside[inside >= 0]
    rank = np.searchsorted(ranks, spans[pieces.span]["rank"])
    works, waiting = classes(segment, pieces)
    at = np.searchsorted(steps, spans["step"][step_of])
    length, lost = pieces.end_ns - pieces.begin_ns, waited_ns(pieces, found)
    waits_as = np.where(waiting, BUBBLE, works)
    np.add.at(seconds, (at, rank, works), (length - lost) / 1e9)
    np.add.at(seconds, (at, rank, waits_as), lost / 1e9)
    np.add.at(waited, (at, rank, waits_as), lost / 1e9)
    seconds[~present], waited[~present] = np.nan, np.nan
    return StepTimes(steps.tolist(), ranks.tolist(), seconds, waited)


def classes(segment: Segment, pieces: Pieces) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the class of each piece, and a mask of the pieces whose waiting time counts as bubble."""
    spans = segment.spans
    of_kind = np.array([CLASSES.index(_OF_KIND[kind]) for kind in Kind])
    of_axis = np.array([CLASSES.index(_OF_AXIS[axis]) for axis in Axis])
    of, root = spans[pieces.span], spans["kind"][pieces.root]
    whole = np.isin(root, _WHOLE) & (pieces.root >= 0)
    joint = of["kind"] == Kind.COLLECTIVE
    late = (of["kind"] == Kind.SEND) & (of["flags"] & Flag.EARLY > 0)  # waits until the next stage has taken it
    own = np.where(late, BUBBLE, np.where(joint, of_axis[of["axis"]], of_kind[of["kind"]]))
    across = np.isin(of["axis"], (Axis.PP, Axis.WORLD)) & (segment.layout.pp > 1)
    waiting: NDArray[np.bool_] = ~whole & ((of["kind"] == Kind.RECEIVE) | (joint & across))
    return np.where(whole, of_kind[root], own), waiting


def waited_ns(pieces: Pieces, found: Waits) -> NDArray[np.int64]:
    """Return how many nanoseconds of each piece were spent waiting."""
    return np.clip(found.until_ns[pieces.span], pieces.begin_ns, pieces.end_ns) - pieces.begin_ns


def _within_steps(segment: Segment, pieces: Pieces) -> NDArray[np.int64]:
    """Return for each piece the index of the enclosing step's span, or -1."""
    spans = segment.spans
    places = np.flatnonzero(spans["kind"] == Kind.STEP)
    found = np.full(pieces.span.size, -1)
    for rank in segment.ranks:
        mine = places[spans["rank"][places] == rank]
        low, high = np.searchsorted(spans["rank"][pieces.span], [rank, rank + 1])
        if mine.size:
            at = np.searchsorted(spans["begin_ns"][mine], pieces.begin_ns[low:high], "right") - 1
            held = (at >= 0) & (pieces.end_ns[low:high] <= spans["end_ns"][mine[at]])
            found[low:high] = np.where(held, mine[at], -1)
    return found


@dataclass(frozen=True)
class Hop:
    """A piece of the critical path; the next piece begins when this one ends, on the same rank or another."""

    rank: int
    stage: int
    microbatch: int
    kind: str  # of the span, in lower case
    class_: str  # one of CLASSES
    begin_s: float  # seconds from the path's beginning
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def critical_path(segment: Segment, step: int) -> list[Hop]:
    """Return the critical path of a step in order of time; empty if no rank has the step."""
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


@dataclass(frozen=True)
class Bar:
    begin_s: float  # seconds from the step's beginning on the first rank
    end_s: float
    what: str  # forward, backward, input or weight; otherwise one of CLASSES
    microbatch: int  # -1 if none


@dataclass(frozen=True)
class TimelineRow:
    rank: int
    stage: int  # -1 for work of no stage
    bars: tuple[Bar, ...]  # in order of time, without overlap


def timeline_rows(segment: Segment, step: int) -> list[TimelineRow]:
    """Return the bars of a step by rank and stage; a rank that lost the step has no row."""
    segment = segment.only(step)
    spans, pieces, found = segment.spans, cut(segment), waits(segment)
    works, waiting = classes(segment, pieces)
    lost = waited_ns(pieces, found)
    began = int(pieces.begin_ns.min()) if pieces.span.size else 0
    rows: dict[tuple[int, int], list[Bar]] = {}
    for i, place in enumerate(pieces.span.tolist()):
        span, root = spans[place], spans[pieces.root[i]] if pieces.root[i] >= 0 else spans[place]
        stage = int(root["stage"] if root["kind"] in _WORDS or span["stage"] < 0 else span["stage"])
        if root["kind"] == Kind.SEND:  # because: a send has the receiver's stage
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
    return [TimelineRow(rank, stage, tuple(bars)) for (rank, stage), bars in sorted(rows.items())]


@dataclass(frozen=True)
class Heat:
    rank: int
    at: Coordinate
    host: str
    own_work_s: float  # seconds a step, the median over the steps; NaN without a whole step
    ratio: float  # to the median over the ranks with the same pp coordinate, which hold the same stages


def heat(segment: Segment, times: StepTimes) -> list[Heat]:
    """Return each rank's own work (compute and optimizer) and its ratio to the rank's peers, in order of ranks."""
    own = np.nansum(times.seconds[:, :, [COMPUTE, OPTIMIZER]], axis=2)
    own[np.isnan(times.seconds[:, :, COMPUTE])] = np.nan
    seen = ~np.isnan(own).all(axis=0) if own.size else np.zeros(len(times.ranks), bool)
    work = np.full(len(times.ranks), np.nan)
    work[seen] = np.nanmedian(own[:, seen], axis=0)
    stage = np.array([segment.at(rank).pp for rank in times.ranks])
    usual = {pp: np.median(work[seen & (stage == pp)]) for pp in set(stage[seen].tolist())}
    return [
        Heat(rank, segment.at(rank), segment.headers[rank].host, float(one), float(one / usual.get(int(pp), np.nan)))
        for rank, one, pp in zip(times.ranks, work, stage, strict=True)
    ]


def by_host(found: list[Heat]) -> dict[str, tuple[int, float, float]]:
    """Return (number of ranks, median ratio, largest ratio) per host, the largest median first."""
    hosts: dict[str, list[float]] = {}
    for one in found:
        if not np.isnan(one.ratio):
            hosts.setdefault(one.host, []).append(one.ratio)
    rows = {host: (len(ratios), float(np.median(ratios)), max(ratios)) for host, ratios in hosts.items()}
    return dict(sorted(rows.items(), key=lambda row: -row[1][1]))
