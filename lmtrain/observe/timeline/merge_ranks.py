"""Merging of all ranks' trace files onto a common clock, start by start: `merge_traces(run_folder) -> Timeline`.

`lmtrain trace` and the report show a Timeline's Segments, one per start of the run (a start may have another layout,
and other machines):
    step_breakdown.step_times(segment)           seconds of each rank's steps by class, adding up to the step
    step_breakdown.rank_heat(segment, times)     own work by rank, with coordinate and host
    step_breakdown.timeline_rows(segment, step)  activity of each rank and stage over time, to draw a step
    step_breakdown.critical_path(segment, step)
    perfetto_export.write_trace(timeline, path)
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
from lmtrain.observe.spans.span_file import SPAN, Axis, Flag, Header, Kind, RankSpans, read_spans
from lmtrain.observe.timeline.clock_offsets import Clocks, Pairs, fit_clocks
from lmtrain.runfolder.file_names import CONFIG, TRACE_FILE, TRACES
from lmtrain.runfolder.folder_reader import not_a_run

_SHORT_WAIT_NS = 20_000  # because: a rank that comes after a collective's end passes at once, and does not show the end
_MAX_SPAN_NS = 3600e9  # because: a span of more than an hour is damaged, or of a rank that hung
_MAX_COLLECTIVES = 20_000  # per window; more add no information, and take memory

Ints = NDArray[np.int64]
_WINDOW_NS = 60e9  # because: within a minute a clock drifts evenly
_MAX_RANKS = 1 << 20
_MAX_DOUBT_NS = 1e6
Spans = NDArray[Any]
# the coordinates (pp, dp_replicate, dp_shard, tp) that differ among the ranks of an axis
_AXIS_DIMENSIONS = {
    Axis.PP: (1, 0, 0, 0), Axis.DP: (0, 1, 1, 0), Axis.DP_REPLICATE: (0, 1, 0, 0), Axis.DP_SHARD: (0, 0, 1, 0),
    Axis.TP: (0, 0, 0, 1), Axis.PLANE: (0, 1, 1, 1), Axis.WORLD: (1, 1, 1, 1),
}  # fmt: skip


def clock_evidence(
    spans: NDArray[Any], rank_index: Ints, origin_ns: int, messages: tuple[Ints, Ints], members: tuple[Ints, Ints]
) -> tuple[Pairs, Pairs]:
    """Return (before, together), pairs of events to which the clocks are fitted: the first event of a pair happened
    before the second, or both ended at about the same time. `messages` is (span indices of sends, span indices of their
    receives), `members` is (span indices of collectives, number of each one's collective). `rank_index` is each span's
    rank; `origin_ns` is subtracted from all times.

    `rank_index` counts only the ranks that have files. In `members`, spans of one collective are next to each other.
    """
    begin, end = (spans[name] - origin_ns for name in ("begin_ns", "end_ns"))
    short = (end >= begin) & (end - begin <= _MAX_SPAN_NS)
    messages = tuple(indices[short[messages[0]] & short[messages[1]]] for indices in messages)
    members = tuple(indices[short[members[0]]] for indices in members)
    before, together = [(*messages, begin[messages[0]], end[messages[1]])], []
    member, group = _thin_collectives(*members)
    has_waited = end[member] - begin[member] >= _SHORT_WAIT_NS
    punctual = spans["flags"][member] & Flag.EARLY == 0
    stride, largest = 1, int(np.bincount(group).max()) if group.size else 0
    while stride < largest:  # because: with powers of two few pairs connect each rank to each other rank in few steps
        earlier, later = np.flatnonzero(group[:-stride] == group[stride:]) + np.array([[0], [stride]])
        both_waited = has_waited[earlier] & has_waited[later]
        a, b = member[earlier[both_waited]], member[later[both_waited]]
        together.append((a, b, end[a], end[b]))
        for early, late in ((earlier, later), (later, earlier)):
            a, b = member[early[punctual[early]]], member[late[punctual[early]]]
            before.append((a, b, begin[a], end[b]))
        stride *= 2
    return _build_pairs(rank_index, before), _build_pairs(rank_index, together)


def _build_pairs(rank_index: Ints, groups: list[tuple[Ints, Ints, Ints, Ints]]) -> Pairs:
    """Concatenate sets of event pairs, each (spans on rank a, spans on rank b, times on a, times on b), into one Pairs.
    `rank_index` gives the rank of each span.
    """
    if not groups:
        no_ranks, no_times = np.zeros(0, np.int64), np.zeros(0)
        return Pairs(no_ranks, no_times, no_ranks, no_times)
    a, b, a_ns, b_ns = (np.concatenate(part) for part in zip(*groups, strict=True))
    return Pairs(rank_index[a], a_ns.astype(np.float64), rank_index[b], b_ns.astype(np.float64))


def _thin_collectives(member: Ints, group: Ints) -> tuple[Ints, Ints]:
    """Keep every n-th collective, so that at most _MAX_COLLECTIVES are left. `member` has span indices and `group` the
    number of each span's collective; return the two arrays of the kept spans.
    """
    numbers = np.unique(group)
    if numbers.size <= _MAX_COLLECTIVES:
        return member, group
    keep = np.isin(group, numbers[:: -(-numbers.size // _MAX_COLLECTIVES)])
    return member[keep], group[keep]


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

    def select_step(self, step: int) -> Segment:
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


def merge_traces(folder: Path) -> Timeline:
    """Read the trace files of the run folder `folder`, and merge the spans of all ranks onto one clock. Raise
    MissingInputError if there are no files, or DataError if none is readable.
    """
    starts, notes = _read_files(folder)
    segments, end_ns = [], 0
    for start, ranks in sorted(starts.items()):
        segment = _build_segment(start, ranks)
        if segment.spans.size:
            shift = max(end_ns - int(segment.spans["begin_ns"].min()), 0)  # because: a wall clock may be set back
            for name in ("begin_ns", "end_ns"):
                segment.spans[name] += shift
            end_ns = int(segment.spans["end_ns"].max())
        segments.append(segment)
    return Timeline(folder, tuple(segments), tuple(notes))


def _read_files(folder: Path) -> tuple[dict[int, list[RankSpans]], list[str]]:
    files = sorted((folder / TRACES).glob("rank-*.spans"))
    if not files:
        if not (folder / CONFIG).is_file():
            raise MissingInputError(not_a_run(folder, f"it has no {CONFIG}"))
        raise MissingInputError(
            f"The run {folder} has no traces ({TRACES}/rank-*.spans). To trace the next steps while it runs, `touch "
            f"{folder / TRACE_FILE}`; a new run is traced by `lmtrain pretrain observe.trace=sampled ...`."
        )
    starts, notes = defaultdict(list), []
    for path in files:
        try:
            rank_spans = read_spans(path)
            _check_header(rank_spans.header, path)
            starts[rank_spans.header.start + 1].append(rank_spans)
        except (DataError, OSError) as error:
            notes.append(str(error))
    if not starts:
        raise DataError("\n".join([f"No trace file in {folder / TRACES} can be read:", *notes[:4]]))
    return starts, notes


def _check_header(header: Header, path: Path) -> None:
    """Raise DataError if the rank, its coordinate and the parallel sizes in a trace file's header contradict each
    other.
    """
    try:
        layout = Layout(*header.sizes)
        possible = (
            layout.world_size == header.world_size <= _MAX_RANKS
            and layout.coordinate(header.rank) == Coordinate(*header.coordinate)
        )
    except LayoutError:
        possible = False
    if not possible:
        raise DataError(
            f"{path} has a header that contradicts itself: rank {header.rank} of {header.world_size} cannot be at "
            f"position {header.coordinate} of a layout {header.sizes}. Delete the file to read the other ranks' files."
        )


def _build_segment(start: int, ranks: list[RankSpans]) -> Segment:
    (sizes, _), *other_layouts = Counter(rank_spans.header.sizes for rank_spans in ranks).most_common()
    notes = [f"start {start}: left out files of another layout, {other}" for other, _ in other_layouts]
    by_rank = {rank_spans.header.rank: rank_spans for rank_spans in ranks if rank_spans.header.sizes == sizes}
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    layout, headers = Layout(*sizes), {rank: by_rank[rank].header for rank in sorted(by_rank)}
    missing = [str(rank) for rank in range(layout.world_size) if rank not in by_rank]
    if missing:
        notes.append(
            f"start {start}: no file of {len(missing)} of {layout.world_size} ranks: {join_few(missing)}; their "
            "work, and how long other ranks waited for them, is not known"
        )
    notes += [f"start {start}: rank {rank} has recorded no span" for rank in by_rank if not by_rank[rank].spans.size]
    spans, names = _join_spans(ranks)
    clocks = _align_clocks(spans, headers, layout)
    notes += _clock_notes(start, clocks, [*headers])
    head = ranks[0].header
    return Segment(start, layout, head.schedule, head.num_microbatches, headers, spans, names, clocks, tuple(notes))


def _join_spans(ranks: Sequence[RankSpans]) -> tuple[Spans, tuple[str, ...]]:
    """Concatenate the spans of all ranks, with times by each rank's wall clock, and merge the ranks' tables of names.
    Return (spans, names). A step whose first spans are overwritten in a full file is left out.
    """
    names: dict[str, int] = {"": 0}
    parts = []
    for rank_spans in ranks:
        header, spans = rank_spans.header, rank_spans.spans
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


def _align_clocks(spans: Spans, headers: dict[int, Header], layout: Layout) -> tuple[Clocks, ...]:
    """Shift the times of `spans`, in place, onto the clock of the lowest rank. Return the corrections of the ranks'
    clocks for each window of steps. `headers` has the header of each rank's trace file.
    """
    if not spans.size:
        return ()
    spans["window"] = _clock_windows(spans)
    ranks = np.array([*headers])
    index = np.searchsorted(ranks, spans["rank"])
    origin = int(spans["begin_ns"].min())
    found = []
    send, receive = message_pairs(spans)
    member, which = collective_groups(spans, layout)
    for window in range(int(spans["window"].max()) + 1):
        inside = spans["window"] == window
        both, group = inside[send] & inside[receive], inside[member]
        pairs = clock_evidence(spans, index, origin, (send[both], receive[both]), (member[group], which[group]))
        clocks = fit_clocks(len(ranks), *pairs)
        for name in ("begin_ns", "end_ns"):
            moved = clocks.correct(index[inside], (spans[name][inside] - origin).astype(np.float64))
            spans[name][inside] = np.rint(moved).astype(np.int64) + origin
        found.append(clocks)
    return tuple(found)


def _clock_windows(spans: Spans) -> NDArray[np.int64]:
    """Return for each span the number of the time window that it belongs to. A window is a run of consecutive steps of
    at most a minute, in which a clock's drift is taken to be constant.
    """
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
    unlinked = sorted({str(ranks[i]) for window in clocks for i in np.flatnonzero(~window.linked)}, key=int)
    if unlinked:
        yield (
            f"start {start}: no message or collective joins {len(unlinked)} ranks to rank {ranks[0]} in some steps "
            f"({join_few(unlinked)}); there their times are by their wall clocks alone"
        )
    unsure = sorted(
        {str(ranks[i]) for window in clocks for i in np.flatnonzero(window.doubt_ns > _MAX_DOUBT_NS)}, key=int
    )
    if unsure:
        yield (
            f"start {start}: what ranks {join_few(unsure)} exchanged does not agree to within a millisecond; their "
            "spans may be off by as much"
        )


def message_pairs(spans: Spans) -> tuple[Ints, Ints]:
    """Return (indices of sends, indices of receives), pair by pair, for all messages whose sender and receiver have
    both recorded their span.
    """
    kind, peer = spans["kind"], spans["peer"]
    sends = np.flatnonzero((kind == Kind.SEND) & (peer >= 0) & (spans["flags"] & Flag.EARLY == 0))
    receives = np.flatnonzero((kind == Kind.RECEIVE) & (peer >= 0))
    candidates = np.concatenate([sends, receives])
    rank, peer_rank = spans["rank"][candidates].astype(np.int64), peer[candidates].astype(np.int64)
    is_send = np.arange(candidates.size) < sends.size
    sender, receiver = np.where(is_send, rank, peer_rank), np.where(is_send, peer_rank, rank)
    key = _combination_numbers(sender, receiver, spans["step"][candidates], spans["number"][candidates])
    _, of_sends, of_receives = np.intersect1d(key[: sends.size], key[sends.size :], return_indices=True)
    return sends[of_sends], receives[of_receives]


def collective_groups(spans: Spans, layout: Layout) -> tuple[Ints, Ints]:
    """Return (span indices, collective numbers), one pair for each span of a collective, ordered by collective and then
    by rank. The spans of one collective on different ranks have the same number.
    """
    indices = np.flatnonzero(
        (spans["kind"] == Kind.COLLECTIVE) & (spans["axis"] != Axis.NONE) & (spans["flags"] & Flag.ASIDE == 0)
    )
    members = spans[indices]
    rank, peer = members["rank"].astype(np.int64), members["peer"].astype(np.int64)
    group = np.where(peer >= 0, np.minimum(rank, peer), lowest_ranks(layout)[members["axis"], rank])
    partner = np.where(peer >= 0, np.maximum(rank, peer), -1) + 1
    key = _combination_numbers(members["axis"], group, partner, members["step"], members["number"])
    order = np.lexsort((rank, key))
    return indices[order], np.unique(key[order], return_inverse=True)[1].astype(np.int64)


def lowest_ranks(layout: Layout) -> Ints:
    """Return an array indexed [axis, rank]: the lowest rank of the group that the rank belongs to along this axis of
    the layout (pp, tp, ...).
    """
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    ranks = np.arange(layout.world_size).reshape(sizes)
    ranks_by_axis = np.zeros((len(Axis), layout.world_size), np.int64)
    for axis, dimensions in _AXIS_DIMENSIONS.items():
        lowest = ranks[tuple(slice(0, 1) if varying else slice(None) for varying in dimensions)]
        ranks_by_axis[axis] = np.broadcast_to(lowest, sizes).ravel()
    return ranks_by_axis


def _combination_numbers(*columns: NDArray[Any]) -> Ints:
    """Return an integer for each position in `columns`, which are arrays of equal length. Two positions get the same
    integer exactly if all columns have equal values there.
    """
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, which = np.unique(column, return_inverse=True)
        key = key * max(len(values), 1) + which  # because: renumbering keeps the values below the number of spans
        key = np.unique(key, return_inverse=True)[1].astype(np.int64)
    return key
