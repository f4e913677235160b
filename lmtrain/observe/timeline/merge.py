"""Merging of all ranks' trace files onto a common clock, start by start: `merged(run_folder) -> Timeline`.

`lmtrain trace` and the report show a Timeline's Segments, one per start of the run (a start may have another layout,
and other machines):
    step_time.step_times(segment)           seconds of each rank's steps by class, adding up to the step
    step_time.heat(segment, times)          own work by rank, with coordinate and host
    step_time.timeline_rows(segment, step)  activity of each rank and stage over time, to draw a step
    step_time.critical_path(segment, step)
    perfetto.write_trace(timeline, path)
The common clock is the lowest rank's: its monotonic clock, set once by its wall clock. Missing or damaged files are
left out and named in `notes`; if no file is readable, an error says what to do. Only reads files; starts nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, LayoutError, MissingInputError, join_few
from lmtrain.layout import Coordinate, Layout
from lmtrain.observe.spans.format import SPAN, Axis, Flag, Header, Kind, RankSpans, read_spans
from lmtrain.observe.timeline.clocks import Clocks, Pairs, solve
from lmtrain.runfolder.names import CONFIG, TRACE_FILE, TRACES

_WAITED_NS = 20_000  # because: a rank that comes after the end passes at once, and does not show the end
_LONGEST_NS = 3600e9  # because: a span of more than an hour is damaged, or of a rank that hung
_MOST_COLLECTIVES = 20_000  # per window; more add no information, and take memory

Ints = NDArray[np.int64]
_WINDOW_NS = 60e9  # because: within a minute a clock drifts evenly
_MOST_RANKS = 1 << 20
_WELL_PLACED_NS = 1e6
Spans = NDArray[Any]
# the coordinates (pp, dp_replicate, dp_shard, tp) that differ among the ranks of an axis
_VARIES = {
    Axis.PP: (1, 0, 0, 0), Axis.DP: (0, 1, 1, 0), Axis.DP_REPLICATE: (0, 1, 0, 0), Axis.DP_SHARD: (0, 0, 1, 0),
    Axis.TP: (0, 0, 0, 1), Axis.PLANE: (0, 1, 1, 1), Axis.WORLD: (1, 1, 1, 1),
}  # fmt: skip


def evidence(
    spans: NDArray[Any], index: Ints, origin: int, sent: tuple[Ints, Ints], joint: tuple[Ints, Ints]
) -> tuple[Pairs, Pairs]:
    """Return the pairs (before, together) for the clock fit.

    `index` is each span's rank as an index. `sent` are the indices of sends and of their receives. `joint` are the
    indices of members' spans and the number of each one's collective, members of a collective next to each other.
    """
    begin, end = (spans[name] - origin for name in ("begin_ns", "end_ns"))
    short = (end >= begin) & (end - begin <= _LONGEST_NS)
    sent = tuple(places[short[sent[0]] & short[sent[1]]] for places in sent)
    joint = tuple(places[short[joint[0]]] for places in joint)
    befores, togethers = [(*sent, begin[sent[0]], end[sent[1]])], []
    place, which = _thinned(*joint)
    waited = end[place] - begin[place] >= _WAITED_NS
    punctual = spans["flags"][place] & Flag.EARLY == 0
    stride, largest = 1, int(np.bincount(which).max()) if which.size else 0
    while stride < largest:  # because: with powers of two few pairs connect each rank to each other rank in few steps
        one, other = np.flatnonzero(which[:-stride] == which[stride:]) + np.array([[0], [stride]])
        both = waited[one] & waited[other]
        a, b = place[one[both]], place[other[both]]
        togethers.append((a, b, end[a], end[b]))
        for early, late in ((one, other), (other, one)):
            a, b = place[early[punctual[early]]], place[late[punctual[early]]]
            befores.append((a, b, begin[a], end[b]))
        stride *= 2
    return _pairs(index, befores), _pairs(index, togethers)


def _pairs(index: Ints, found: list[tuple[Ints, Ints, Ints, Ints]]) -> Pairs:
    if not found:
        none, never = np.zeros(0, np.int64), np.zeros(0)
        return Pairs(none, never, none, never)
    a, b, a_ns, b_ns = (np.concatenate(part) for part in zip(*found, strict=True))
    return Pairs(index[a], a_ns.astype(np.float64), index[b], b_ns.astype(np.float64))


def _thinned(place: Ints, which: Ints) -> tuple[Ints, Ints]:
    numbers = np.unique(which)
    if numbers.size <= _MOST_COLLECTIVES:
        return place, which
    keep = np.isin(which, numbers[:: -(-numbers.size // _MOST_COLLECTIVES)])
    return place[keep], which[keep]


MERGED = np.dtype([*[(name, SPAN[name]) for name in SPAN.names or ()], ("rank", "<u4"), ("window", "<u4")])


@dataclass(frozen=True)
class Segment:
    """The merged spans of one start of a run."""

    start: int  # counted from 1, as in all output; files and headers count from 0
    layout: Layout
    schedule: str
    num_microbatches: int
    headers: dict[int, Header]  # by rank; only ranks whose file could be read
    spans: Spans  # dtype MERGED, by rank and beginning, on the common clock; `name` is an index into `names`
    names: tuple[str, ...]
    clocks: tuple[Clocks, ...]  # per window of consecutive steps; ranks in the order of `ranks`
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> list[int]:
        return list(self.headers)

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(header.host for header in self.headers.values()))

    def at(self, rank: int) -> Coordinate:
        return self.layout.coordinate(rank)

    def of(self, rank: int) -> Spans:
        ranks = self.spans["rank"]
        return self.spans[np.searchsorted(ranks, rank) : np.searchsorted(ranks, rank, "right")]

    def only(self, step: int) -> Segment:
        """Return the segment with the spans of one step only."""
        return replace(self, spans=self.spans[self.spans["step"] == step])

    @property
    def steps(self) -> list[int]:
        """The steps that at least one rank has completed, and of which it has a whole record."""
        return [int(step) for step in np.unique(self.spans["step"][self.spans["kind"] == Kind.STEP])]


@dataclass(frozen=True)
class Timeline:
    folder: Path
    segments: tuple[Segment, ...]  # in order of time
    notes: tuple[str, ...]  # files that could not be read or are missing, a sentence each


def merged(folder: Path) -> Timeline:
    """Read and merge the trace files of a run folder. Raise if there is none, or none that is readable."""
    starts, notes = _read(folder)
    segments, end_ns = [], 0
    for start, ranks in sorted(starts.items()):
        segment = _segment(start, ranks)
        if segment.spans.size:
            shift = max(end_ns - int(segment.spans["begin_ns"].min()), 0)  # because: a wall clock may be set back
            for name in ("begin_ns", "end_ns"):
                segment.spans[name] += shift
            end_ns = int(segment.spans["end_ns"].max())
        segments.append(segment)
    return Timeline(folder, tuple(segments), tuple(notes))


def _read(folder: Path) -> tuple[dict[int, list[RankSpans]], list[str]]:
    files = sorted((folder / TRACES).glob("rank-*.spans"))
    if not files:
        if not (folder / CONFIG).is_file():
            raise MissingInputError(f"{folder} is not a run's folder: it has no {CONFIG}. Name a run.dir.")
        raise MissingInputError(
            f"{folder} has no traces ({TRACES}/rank-*.spans). A run that goes on traces its next steps after "
            f"`touch {folder / TRACE_FILE}`; a new one does with observe.trace=sampled or observe.trace=all."
        )
    starts, notes = defaultdict(list), []
    for path in files:
        try:
            one = read_spans(path)
            _check(one, path)
            starts[one.header.start + 1].append(one)
        except (DataError, OSError) as error:
            notes.append(str(error))
    if not starts:
        raise DataError("\n".join(notes[:4]))
    return starts, notes


def _check(one: RankSpans, path: Path) -> None:
    """Raise DataError if the header's rank, coordinate and sizes contradict each other."""
    header = one.header
    try:
        layout = Layout(*header.sizes)
        possible = (
            layout.world_size == header.world_size <= _MOST_RANKS
            and layout.coordinate(header.rank) == Coordinate(*header.coordinate)
        )
    except LayoutError:
        possible = False
    if not possible:
        raise DataError(
            f"{path} says that it is of rank {header.rank} of {header.world_size} at {header.coordinate} of "
            f"{header.sizes}, which cannot be. Delete it to read the other ranks' without it."
        )


def _segment(start: int, ranks: list[RankSpans]) -> Segment:
    (sizes, _), *others = Counter(one.header.sizes for one in ranks).most_common()
    notes = [f"start {start}: left out files of another layout, {other}" for other, _ in others]
    of_rank = {one.header.rank: one for one in ranks if one.header.sizes == sizes}
    ranks = [of_rank[rank] for rank in sorted(of_rank)]
    layout, headers = Layout(*sizes), {rank: of_rank[rank].header for rank in sorted(of_rank)}
    missing = [str(rank) for rank in range(layout.world_size) if rank not in of_rank]
    if missing:
        notes.append(
            f"start {start}: no file of {len(missing)} of {layout.world_size} ranks: {join_few(missing)}; what they "
            "did, and what others waited for them, is not known"
        )
    notes += [f"start {start}: rank {rank} has left no span" for rank, one in of_rank.items() if not one.spans.size]
    spans, names = _joined(ranks)
    clocks = _on_one_clock(spans, headers, layout)
    notes += _clock_notes(start, clocks, [*headers])
    head = ranks[0].header
    return Segment(start, layout, head.schedule, head.num_microbatches, headers, spans, names, clocks, tuple(notes))


def _joined(ranks: Sequence[RankSpans]) -> tuple[Spans, tuple[str, ...]]:
    """Return the ranks' whole steps in one array, by each rank's wall clock, and one table of names."""
    names: dict[str, int] = {"": 0}
    parts = []
    for one in ranks:
        header, spans = one.header, one.spans
        if header.num_written >= header.capacity and spans.size:  # because: a full ring lost its oldest step's start
            spans = spans[spans["step"] > spans["step"].min()]
        part = np.zeros(spans.size, MERGED)
        for name in SPAN.names or ():
            part[name] = spans[name]
        part["name"] = np.array([names.setdefault(name, len(names)) for name in header.names])[spans["name"]]
        part["rank"] = header.rank
        for name in ("begin_ns", "end_ns"):
            part[name] += header.wall_ns - header.monotonic_ns
        parts.append(part)
    return np.concatenate(parts), tuple(names)


def _on_one_clock(spans: Spans, headers: dict[int, Header], layout: Layout) -> tuple[Clocks, ...]:
    """Correct the spans' times in place, window by window, and return each window's clocks."""
    if not spans.size:
        return ()
    spans["window"] = _windows(spans)
    ranks = np.array([*headers])
    index = np.searchsorted(ranks, spans["rank"])
    origin = int(spans["begin_ns"].min())
    found = []
    send, receive = messages(spans)
    member, which = collectives(spans, layout)
    for window in range(int(spans["window"].max()) + 1):
        inside = spans["window"] == window
        both, group = inside[send] & inside[receive], inside[member]
        pairs = evidence(spans, index, origin, (send[both], receive[both]), (member[group], which[group]))
        clocks = solve(len(ranks), *pairs)
        for name in ("begin_ns", "end_ns"):
            moved = clocks.correct(index[inside], (spans[name][inside] - origin).astype(np.float64))
            spans[name][inside] = np.rint(moved).astype(np.int64) + origin
        found.append(clocks)
    return tuple(found)


def _windows(spans: Spans) -> NDArray[np.int64]:
    """Return a window number for each span: consecutive steps, at most as long as a clock's drift is even."""
    steps = np.unique(spans["step"])
    first = np.full(steps.size, np.iinfo(np.int64).max)
    np.minimum.at(first, np.searchsorted(steps, spans["step"]), spans["begin_ns"])
    window, began, numbers = 0, int(first[0]), [0]
    for at in range(1, steps.size):
        if steps[at] != steps[at - 1] + 1 or first[at] - began > _WINDOW_NS:
            window, began = window + 1, int(first[at])
        numbers.append(window)
    return np.array(numbers)[np.searchsorted(steps, spans["step"])]


def _clock_notes(start: int, clocks: Sequence[Clocks], ranks: list[int]) -> Iterator[str]:
    apart = sorted({str(ranks[i]) for one in clocks for i in np.flatnonzero(~one.linked)}, key=int)
    if apart:
        yield (
            f"start {start}: no message or collective joins {len(apart)} ranks to rank {ranks[0]} in some steps "
            f"({join_few(apart)}); there they are placed by their wall clocks alone"
        )
    unsure = sorted({str(ranks[i]) for one in clocks for i in np.flatnonzero(one.doubt_ns > _WELL_PLACED_NS)}, key=int)
    if unsure:
        yield (
            f"start {start}: what ranks {join_few(unsure)} exchanged does not agree to within a millisecond; their "
            "spans may be off by as much"
        )


def messages(spans: Spans) -> tuple[Ints, Ints]:
    """Return the indices of the sends whose receive is recorded too, and of those receives, pair by pair."""
    kind, peer = spans["kind"], spans["peer"]
    sends = np.flatnonzero((kind == Kind.SEND) & (peer >= 0) & (spans["flags"] & Flag.EARLY == 0))
    receives = np.flatnonzero((kind == Kind.RECEIVE) & (peer >= 0))
    both = np.concatenate([sends, receives])
    rank, other = spans["rank"][both].astype(np.int64), peer[both].astype(np.int64)
    sent = np.arange(both.size) < sends.size
    key = _key(np.where(sent, rank, other), np.where(sent, other, rank), spans["step"][both], spans["number"][both])
    _, of_sends, of_receives = np.intersect1d(key[: sends.size], key[sends.size :], return_indices=True)
    return sends[of_sends], receives[of_receives]


def collectives(spans: Spans, layout: Layout) -> tuple[Ints, Ints]:
    """Return the indices of members' spans, grouped by collective and ordered by rank, and the group numbers."""
    places = np.flatnonzero(
        (spans["kind"] == Kind.COLLECTIVE) & (spans["axis"] != Axis.NONE) & (spans["flags"] & Flag.ASIDE == 0)
    )
    of = spans[places]
    rank, peer = of["rank"].astype(np.int64), of["peer"].astype(np.int64)
    group = np.where(peer >= 0, np.minimum(rank, peer), first_ranks(layout)[of["axis"], rank])
    partner = np.where(peer >= 0, np.maximum(rank, peer), -1) + 1
    key = _key(of["axis"], group, partner, of["step"], of["number"])
    order = np.lexsort((rank, key))
    return places[order], np.unique(key[order], return_inverse=True)[1].astype(np.int64)


def first_ranks(layout: Layout) -> Ints:
    """Return [axis, rank]: the lowest rank of the group of each rank along each axis."""
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    ranks = np.arange(layout.world_size).reshape(sizes)
    found = np.zeros((len(Axis), layout.world_size), np.int64)
    for axis, varies in _VARIES.items():
        lowest = ranks[tuple(slice(0, 1) if varying else slice(None) for varying in varies)]
        found[axis] = np.broadcast_to(lowest, sizes).ravel()
    return found


def _key(*parts: NDArray[Any]) -> Ints:
    """Return a number for each element that is equal for equal combinations of the parts."""
    key = np.zeros(len(parts[0]), np.int64)
    for part in parts:
        values, which = np.unique(part, return_inverse=True)
        key = key * max(len(values), 1) + which  # because: renumbering keeps the values below the number of spans
        key = np.unique(key, return_inverse=True)[1].astype(np.int64)
    return key
