"""The time of each rank's steps by class; the classes of a step add up to the step.

Called by `lmtrain trace` and by rank_heat. `bubble` is the time that a pipeline rank waits before its message is sent,
and before the last rank reaches a collective over stages; `pp` is the transfer time of messages. A collective over tp
or dp counts as a whole, and `waited` is the part of it spent waiting for a slower member.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.layout import Coordinate
from lmtrain.observe.spans.span_file import Axis, Flag, Kind
from lmtrain.observe.timeline.merge_ranks import Segment, collective_groups, message_pairs

_END = int(np.iinfo(np.int64).max)

Ints = NDArray[np.int64]
CLASSES = ("compute", "pp", "dp", "tp", "world", "bubble", "data", "optimizer", "save", "measuring", "other")
COMPUTE, MESSAGES, BUBBLE, OPTIMIZER = (CLASSES.index(word) for word in ("compute", "pp", "bubble", "optimizer"))
_KIND_CLASS = {
    Kind.STEP: "other", Kind.DATA: "data", Kind.FORWARD: "compute", Kind.BACKWARD: "compute", Kind.INPUT: "compute",
    Kind.WEIGHT: "compute", Kind.COLLECTIVE: "world", Kind.SEND: "pp", Kind.RECEIVE: "pp", Kind.OPTIMIZER: "optimizer",
    Kind.SAVE: "save", Kind.VALIDATION: "measuring", Kind.EVALUATION: "measuring", Kind.OTHER: "other",
}  # fmt: skip
_AXIS_CLASS = {
    Axis.NONE: "other", Axis.PP: "pp", Axis.DP: "dp", Axis.DP_REPLICATE: "dp", Axis.DP_SHARD: "dp", Axis.TP: "tp",
    Axis.PLANE: "world", Axis.WORLD: "world",
}  # fmt: skip
_BAR_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "input", Kind.WEIGHT: "weight"}
_INCLUSIVE_KINDS = np.array([Kind.SAVE, Kind.VALIDATION, Kind.EVALUATION])  # kinds that include all spans inside them


@dataclass(frozen=True)
class Pieces:
    """Intervals in which one span is the innermost: arrays of equal length, by rank and time.

    `span` and `root` are indices into the segment's spans.
    """

    span: Ints
    root: Ints  # the outermost span around it, except the step's
    begin_ns: Ints
    end_ns: Ints

    def select(self, chosen: Any) -> Pieces:
        """Return the pieces chosen by a mask or by indices."""
        return Pieces(self.span[chosen], self.root[chosen], self.begin_ns[chosen], self.end_ns[chosen])


@dataclass(frozen=True)
class Waits:
    """Per span: the end of its wait for another rank, and the index of the span waited for (-1: none or unknown)."""

    until_ns: Ints
    cause: Ints


def cut_pieces(segment: Segment) -> Pieces:
    """Cut each rank's time into pieces at the borders of the traced spans, so that in each piece one span is the
    innermost. Spans on another stream or thread than the computation's are left out. `segment` has the spans of one
    start of the run.
    """
    chosen = np.flatnonzero(segment.spans["flags"] & Flag.ASIDE == 0)
    spans = segment.spans[chosen]
    pieces: list[tuple[int, int, int, int]] = []
    open_: list[tuple[int, int, int]] = []  # (index, end, root) of the spans around the current time
    current_rank, covered_ns = -1, 0

    def work_until(moment: int) -> None:
        """Append the time from `covered_ns` to `moment`, in ns, to `pieces`: each stretch of it belongs to the
        innermost span that is open then.
        """
        nonlocal covered_ns
        while open_ and covered_ns < moment:
            index, end, root = open_[-1]
            until = min(end, moment)
            if until > covered_ns:
                pieces.append((index, root, covered_ns, until))
                covered_ns = until
            if end <= covered_ns:
                open_.pop()

    columns = (chosen, *(spans[name] for name in ("rank", "kind", "begin_ns", "end_ns")))
    for index, rank, kind, begin, end in zip(*(column.tolist() for column in columns), strict=True):
        work_until(_END if rank != current_rank else begin)
        current_rank, covered_ns = rank, begin
        root = open_[-1][2] if open_ and open_[-1][2] >= 0 else -1 if kind == Kind.STEP else index
        open_.append((index, end, root))
    work_until(_END)
    return Pieces(*np.array(pieces, np.int64).reshape(-1, 4).T)


def find_waits(segment: Segment) -> Waits:
    """Return two values for each traced span: the time in ns until which it only waited for another rank, and the index
    of the span there that it waited for (-1: none). A receive waits until its message is sent, a collective until its
    last member begins. `segment` has the spans of one start of the run.
    """
    spans = segment.spans
    until, cause = spans["begin_ns"].copy(), np.full(spans.size, -1)
    receive = spans["kind"] == Kind.RECEIVE
    until[receive] = spans["end_ns"][receive]  # because: without the sender's record all of it counts as waiting
    sent, received = message_pairs(spans)
    until[received], cause[received] = spans["begin_ns"][sent], sent

    member, group = collective_groups(spans, segment.layout)
    if member.size:
        begin, num = spans["begin_ns"][member], int(group.max()) + 1
        early = np.bincount(group, spans["flags"][member] & Flag.EARLY, num) > 0
        last = np.lexsort((begin, group))[np.cumsum(np.bincount(group, minlength=num)) - 1]  # last member of each
        waits = ~early[group] & (member != member[last][group])
        until[member[waits]], cause[member[waits]] = begin[last][group[waits]], member[last][group[waits]]
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
        """Return mean seconds of waiting for other ranks per class, over all steps and ranks."""
        return dict(zip(CLASSES, np.nanmean(self.waited, axis=(0, 1)).tolist(), strict=True))

    def by_rank(self) -> NDArray[np.float64]:
        """Return [rank, class]: means over the steps; NaN for a rank without a whole step."""
        num = np.sum(~np.isnan(self.seconds), axis=0)
        return np.where(num > 0, np.nansum(self.seconds, axis=0) / np.maximum(num, 1), np.nan)


def step_times(segment: Segment) -> StepTimes:
    """Return the seconds of each completed step on each rank, divided into the CLASSES (compute, pp, bubble, ...), and
    the part of them that was spent waiting for other ranks. `segment` has the traced spans of one start of the run.
    """
    spans, steps, ranks = segment.spans, np.array(segment.steps), np.array(segment.ranks)
    shape = (steps.size, ranks.size, len(CLASSES))
    seconds, waited = np.zeros(shape), np.zeros(shape)
    step = spans[spans["kind"] == Kind.STEP]
    present = np.zeros(shape[:2], bool)
    present[np.searchsorted(steps, step["step"]), np.searchsorted(ranks, step["rank"])] = True
    pieces, waits = cut_pieces(segment), find_waits(segment)
    step_spans = _enclosing_steps(segment, pieces)
    pieces, piece_step = pieces.select(step_spans >= 0), step_spans[step_spans >= 0]
    rank = np.searchsorted(ranks, spans[pieces.span]["rank"])
    class_numbers, waiting = piece_classes(segment, pieces)
    step_index = np.searchsorted(steps, spans["step"][piece_step])
    length, waited_of_piece = pieces.end_ns - pieces.begin_ns, waited_ns(pieces, waits)
    wait_class = np.where(waiting, BUBBLE, class_numbers)
    np.add.at(seconds, (step_index, rank, class_numbers), (length - waited_of_piece) / 1e9)
    np.add.at(seconds, (step_index, rank, wait_class), waited_of_piece / 1e9)
    np.add.at(waited, (step_index, rank, wait_class), waited_of_piece / 1e9)
    seconds[~present], waited[~present] = np.nan, np.nan
    return StepTimes(steps.tolist(), ranks.tolist(), seconds, waited)


def piece_classes(segment: Segment, pieces: Pieces) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return two arrays over `pieces`, the stretches of time from `cut_pieces`: the index of the piece's class in
    CLASSES, and whether time spent waiting in it counts as pipeline bubble.
    """
    spans = segment.spans
    of_kind = np.array([CLASSES.index(_KIND_CLASS[kind]) for kind in Kind])
    of_axis = np.array([CLASSES.index(_AXIS_CLASS[axis]) for axis in Axis])
    piece_spans, root = spans[pieces.span], spans["kind"][pieces.root]
    is_inclusive = np.isin(root, _INCLUSIVE_KINDS) & (pieces.root >= 0)
    is_collective = piece_spans["kind"] == Kind.COLLECTIVE
    # because: a send with this flag is the wait until the next stage has taken the message
    is_send_wait = (piece_spans["kind"] == Kind.SEND) & (piece_spans["flags"] & Flag.EARLY > 0)
    own = np.where(is_collective, of_axis[piece_spans["axis"]], of_kind[piece_spans["kind"]])
    own = np.where(is_send_wait, BUBBLE, own)
    across = np.isin(piece_spans["axis"], (Axis.PP, Axis.WORLD)) & (segment.layout.pp > 1)
    waiting: NDArray[np.bool_] = ~is_inclusive & ((piece_spans["kind"] == Kind.RECEIVE) | (is_collective & across))
    return np.where(is_inclusive, of_kind[root], own), waiting


def waited_ns(pieces: Pieces, waits: Waits) -> NDArray[np.int64]:
    """Return how many nanoseconds of each piece were spent waiting."""
    return np.clip(waits.until_ns[pieces.span], pieces.begin_ns, pieces.end_ns) - pieces.begin_ns


def _enclosing_steps(segment: Segment, pieces: Pieces) -> NDArray[np.int64]:
    """Return for each of `pieces`, the stretches of time from `cut_pieces`, the index of the step's span that contains
    it, or -1 outside all steps.
    """
    spans = segment.spans
    places = np.flatnonzero(spans["kind"] == Kind.STEP)
    enclosing = np.full(pieces.span.size, -1)
    for rank in segment.ranks:
        own_steps = places[spans["rank"][places] == rank]
        low, high = np.searchsorted(spans["rank"][pieces.span], [rank, rank + 1])
        if own_steps.size:
            position = np.searchsorted(spans["begin_ns"][own_steps], pieces.begin_ns[low:high], "right") - 1
            is_inside = (position >= 0) & (pieces.end_ns[low:high] <= spans["end_ns"][own_steps[position]])
            enclosing[low:high] = np.where(is_inside, own_steps[position], -1)
    return enclosing


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
    """Return the critical path of step number `step`, in order of time: the chain of work and messages on which the end
    of the step depended. Empty if no rank has recorded the step in `segment`, the spans of one start of the run.
    """
    segment = segment.select_step(step)
    spans = segment.spans
    steps = np.flatnonzero(spans["kind"] == Kind.STEP)
    if not steps.size:
        return []
    pieces, waits = cut_pieces(segment), find_waits(segment)
    class_numbers, _ = piece_classes(segment, pieces)
    ranks = spans["rank"][pieces.span]
    last = steps[np.argmax(spans["end_ns"][steps])]
    rank, time_ns = int(spans["rank"][last]), int(spans["end_ns"][last])
    reversed_path: list[tuple[int, int, int]] = []  # piece, begin, end
    while True:
        low, high = np.searchsorted(ranks, [rank, rank + 1])
        piece = int(low) + int(np.searchsorted(pieces.begin_ns[low:high], time_ns)) - 1
        if piece < low:
            break
        time_ns = min(time_ns, int(pieces.end_ns[piece]))
        span_index = int(pieces.span[piece])
        cause, until = int(waits.cause[span_index]), int(waits.until_ns[span_index])
        waited = cause >= 0 and pieces.begin_ns[piece] < until < time_ns
        begin = until if waited else int(pieces.begin_ns[piece])
        reversed_path.append((piece, begin, time_ns))
        time_ns = begin
        if waited:
            rank = int(spans["rank"][cause])
    start = reversed_path[-1][1]
    return [
        Hop(
            int(span["rank"]), int(span["stage"]), int(span["microbatch"]), Kind(span["kind"]).name.lower(),
            CLASSES[class_numbers[piece]], (begin - start) / 1e9, (end - start) / 1e9,
        )
        for piece, begin, end in reversed(reversed_path)
        for span in (spans[pieces.span[piece]],)
    ]  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """An activity of a rank in the drawing of a step."""

    begin_s: float  # seconds from the step's beginning on the first rank
    end_s: float
    what: str  # forward, backward, input or weight; otherwise one of CLASSES
    microbatch: int  # -1 if none


@dataclass(frozen=True)
class TimelineRow:
    """The activities of one rank and pipeline stage in the drawing of a step."""

    rank: int
    stage: int  # -1 for work of no stage
    bars: tuple[Bar, ...]  # in order of time, without overlap


def timeline_rows(segment: Segment, step: int) -> list[TimelineRow]:
    """Return what to draw of step number `step`: a row per rank and pipeline stage, with a bar for each activity. A
    rank that has not recorded the step in `segment`, the spans of one start of the run, has no row.
    """
    segment = segment.select_step(step)
    spans, pieces, waits = segment.spans, cut_pieces(segment), find_waits(segment)
    class_numbers, waiting = piece_classes(segment, pieces)
    waited = waited_ns(pieces, waits)
    began = int(pieces.begin_ns.min()) if pieces.span.size else 0
    rows: dict[tuple[int, int], list[Bar]] = {}
    for i, span_index in enumerate(pieces.span.tolist()):
        span, root = spans[span_index], spans[pieces.root[i]] if pieces.root[i] >= 0 else spans[span_index]
        stage = int(root["stage"] if root["kind"] in _BAR_NAMES or span["stage"] < 0 else span["stage"])
        if root["kind"] == Kind.SEND:  # because: a send has the receiver's stage
            stage = -1
        begin, end = int(pieces.begin_ns[i]) - began, int(pieces.end_ns[i]) - began
        middle = begin + int(waited[i])
        class_name = CLASSES[class_numbers[i]]
        bars = rows.setdefault((int(span["rank"]), stage), [])
        microbatch = int(span["microbatch"] if span["microbatch"] >= 0 else root["microbatch"])
        if middle > begin:
            bars.append(Bar(begin / 1e9, middle / 1e9, "bubble" if waiting[i] else class_name, microbatch))
        if end > middle:
            bars.append(Bar(middle / 1e9, end / 1e9, _BAR_NAMES.get(Kind(span["kind"]), class_name), microbatch))
    return [TimelineRow(rank, stage, tuple(bars)) for (rank, stage), bars in sorted(rows.items())]


@dataclass(frozen=True)
class Heat:
    """The duration of a rank's own work, alone and compared with its peers."""

    rank: int
    at: Coordinate
    host: str
    own_work_s: float  # seconds a step, the median over the steps; NaN without a whole step
    ratio: float  # to the median over the ranks with the same pp coordinate, which hold the same stages


def rank_heat(segment: Segment, times: StepTimes) -> list[Heat]:
    """Return for each rank the seconds a step of its own work (compute and optimizer; the median over the steps), and
    the ratio of that to the median of the ranks at the same place in the pipeline.
    """
    own = np.nansum(times.seconds[:, :, [COMPUTE, OPTIMIZER]], axis=2)
    own[np.isnan(times.seconds[:, :, COMPUTE])] = np.nan
    has_work = ~np.isnan(own).all(axis=0) if own.size else np.zeros(len(times.ranks), bool)
    work = np.full(len(times.ranks), np.nan)
    work[has_work] = np.nanmedian(own[:, has_work], axis=0)
    stage = np.array([segment.layout.coordinate(rank).pp for rank in times.ranks])
    usual_s = {pp: np.median(work[has_work & (stage == pp)]) for pp in set(stage[has_work].tolist())}
    return [
        Heat(
            rank, segment.layout.coordinate(rank), segment.headers[rank].host, float(seconds),
            float(seconds / usual_s.get(int(pp), np.nan)),
        )
        for rank, seconds, pp in zip(times.ranks, work, stage, strict=True)
    ]


def heat_by_host(heats: list[Heat]) -> dict[str, tuple[int, float, float]]:
    """Return host -> (number of ranks, median ratio, largest ratio), the host with the largest median first. A rank's
    ratio is its own work time relative to its peers'.
    """
    hosts: dict[str, list[float]] = {}
    for heat in heats:
        if not np.isnan(heat.ratio):
            hosts.setdefault(heat.host, []).append(heat.ratio)
    rows = {host: (len(ratios), float(np.median(ratios)), max(ratios)) for host, ratios in hosts.items()}
    return dict(sorted(rows.items(), key=lambda row: -row[1][1]))
