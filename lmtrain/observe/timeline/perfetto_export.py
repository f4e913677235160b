"""A Timeline in the trace event format of ui.perfetto.dev and chrome://tracing.

Called by `lmtrain trace`. A host is shown as a process; a rank has a thread for itself and one for each of its stages.
Arrows go from each send to its receive. The starts of a run follow each other in time. A file whose name ends in .gz is
compressed.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmtrain.observe.spans.span_file import Axis, Flag, Kind
from lmtrain.observe.timeline.merge_ranks import Segment, Timeline, message_pairs
from lmtrain.runtime.files.atomic_files import atomic_file, json_bytes, storage_errors
from lmtrain.runtime.files.existing_output import Kind as OutputKind

_ACTIONS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
_NO_STAGE, _ASIDE = -1, 1 << 20  # stand-ins for a stage: none; lanes (a thread each) beside the computation
_KIND_NAMES = {Kind.INPUT: "backward, inputs", Kind.WEIGHT: "backward, weights"}

_BEGINNING = b'{"displayTimeUnit": "ms", "otherData": '

Event = dict[str, Any]


class _Threads:
    """The numbers of processes and threads, and the metadata events that name them."""

    def __init__(self) -> None:
        self.processes: dict[str, int] = {}
        self.threads: dict[tuple[int, int, int], int] = {}  # (start, rank, stage)
        self.metadata: list[Event] = []

    def thread_of(self, segment: Segment, rank: int, stage: int) -> tuple[int, int]:
        """Return (process number, thread number) under which viewers show a pipeline stage of rank `rank`. New numbers
        are assigned and named if needed.
        """
        host = segment.headers[rank].host
        if host not in self.processes:
            pid = self.processes[host] = len(self.processes) + 1
            self._add_metadata(pid, 0, "process", f"host {host}", pid)
        pid, key = self.processes[host], (segment.start, rank, stage)
        if key not in self.threads:
            tid = self.threads[key] = len(self.threads) + 1
            coordinate = segment.layout.coordinate(rank)
            dp = coordinate.dp_replicate * segment.layout.dp_shard + coordinate.dp_shard
            label = f"(pp {coordinate.pp}, dp {dp}, tp {coordinate.tp})" if stage == _NO_STAGE else f"stage {stage}"
            label = f"beside {stage - _ASIDE}" if stage >= _ASIDE else label
            start = f"start {segment.start}: " if segment.start > 1 else ""
            order = (segment.start << 40) + (rank << 21) + stage + 1
            self._add_metadata(pid, tid, "thread", f"{start}rank {rank} {label}", order)
        return pid, self.threads[key]

    def _add_metadata(self, pid: int, tid: int, what: str, name: str, order: int) -> None:
        for part, args in (("name", {"name": name}), ("sort_index", {"sort_index": order})):
            self.metadata.append({"ph": "M", "name": f"{what}_{part}", "pid": pid, "tid": tid, "ts": 0, "args": args})


def trace_events(timeline: Timeline) -> Iterator[Event]:
    """Yield the Chrome trace events of a whole run, which may have been started several times: one event per span, two
    per message (the ends of its arrow), and one for each name of a process or thread.
    """
    threads = _Threads()
    filled = [segment for segment in timeline.segments if segment.spans.size]
    origin = min((int(segment.spans["begin_ns"].min()) for segment in filled), default=0)
    flow = 0
    for segment in filled:
        events = _slice_events(segment, threads, origin)
        yield from events.values()
        sent, received = message_pairs(segment.spans)
        for send, receive in zip(sent.tolist(), received.tolist(), strict=True):
            send_event, receive_event = events[send], events[receive]
            flow += 1
            arrow = {"cat": "message", "name": "message", "id": flow}
            yield {"ph": "s", **arrow, **_thread_ids(send_event), "ts": send_event["ts"]}
            # because: a slice excludes its own end, and an arrow ends in the slice that contains it
            late = receive_event["ts"] + receive_event["dur"] - 0.001 if receive_event["dur"] else receive_event["ts"]
            yield {"ph": "f", "bp": "e", **arrow, **_thread_ids(receive_event), "ts": round(late, 3)}
    yield from threads.metadata


def _is_trace(path: Path) -> bool:
    """Return whether `write_trace` has written the file at a path."""
    with suppress(OSError, EOFError, zlib.error), open(path, "rb") as plain:
        is_packed = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        return (gzip.GzipFile(fileobj=plain) if is_packed else plain).read(len(_BEGINNING)) == _BEGINNING
    return False


TRACE_FILE = OutputKind("a trace of a run", _is_trace)


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the timeline to `path` as a Chrome trace JSON file, compressed if the name ends in .gz."""
    began = min((int(s.spans["begin_ns"].min()) for s in timeline.segments if s.spans.size), default=0)
    other_data = {
        "run": str(timeline.folder), "began": datetime.fromtimestamp(began / 1e9, UTC).isoformat(),
        "notes": [*timeline.notes, *(note for segment in timeline.segments for note in segment.notes)],
    }  # fmt: skip
    with storage_errors(path, "Writing"), ExitStack() as stack:
        plain = stack.enter_context(atomic_file(path))
        packed = stack.enter_context(gzip.GzipFile("", "wb", 6, plain, 0)) if path.suffix == ".gz" else None
        write = plain.write if packed is None else packed.write
        write(_BEGINNING + json_bytes(other_data) + b', "traceEvents": [\n')
        for number, event in enumerate(trace_events(timeline)):
            write((b",\n" if number else b"") + json_bytes(event))
        write(b"\n]}\n")


def _slice_events(segment: Segment, threads: _Threads, origin: int) -> dict[int, Event]:
    """Return span index -> Chrome trace event for all spans in `segment`, which are those of one start of the run.
    Events on one thread never overlap in part: a span that outlasts the one around it is shortened. `threads` numbers
    the threads; `origin` is the time in ns that becomes 0.
    """
    events: dict[int, Event] = {}
    open_: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by thread: (end, stage) of the open spans
    lanes: dict[int, list[int]] = {}  # by rank: the end of each lane's last span
    last_stage: dict[int, int] = {}
    action_end: dict[int, int] = {}
    names = segment.spans.dtype.names or ()
    for index, values in enumerate(segment.spans.tolist()):
        span = dict(zip(names, values, strict=True))
        rank, begin, end = span["rank"], span["begin_ns"], span["end_ns"]
        stage, kind = span["stage"], span["kind"]
        if span["flags"] & Flag.ASIDE:
            ends = lanes.setdefault(rank, [])
            lane = next((i for i, free in enumerate(ends) if free <= begin), len(ends))
            ends[lane : lane + 1] = [end]
            stage = _ASIDE + lane
        elif kind in _ACTIONS or kind == Kind.RECEIVE:
            last_stage[rank] = stage
            action_end[rank] = max(end, action_end.get(rank, 0)) if kind in _ACTIONS else action_end.get(rank, 0)
        elif kind == Kind.SEND or (kind == Kind.COLLECTIVE and begin < action_end.get(rank, 0)):
            stage = last_stage.get(rank, _NO_STAGE)  # a message's own stage is the receiver's
        else:
            stage = _NO_STAGE
        thread = threads.thread_of(segment, rank, stage)
        enclosing = open_.setdefault(thread, [])
        while enclosing and enclosing[-1][0] <= begin:
            enclosing.pop()
        end = min(end, enclosing[-1][0]) if enclosing else end
        enclosing.append((end, stage))
        events[index] = {
            "ph": "X", "name": _span_name(segment, span), "cat": Kind(kind).name.lower(),
            "ts": (begin - origin) / 1000, "dur": (end - begin) / 1000, "pid": thread[0], "tid": thread[1],
            "args": _span_args(span),
        }  # fmt: skip
    return events


def _span_name(segment: Segment, span: dict[str, int]) -> str:
    kind, microbatch = Kind(span["kind"]), span["microbatch"]
    if kind == Kind.STEP:
        return f"step {span['step']}"
    if span["name"]:
        return segment.names[span["name"]]
    word = _KIND_NAMES.get(kind, kind.name.lower())
    return f"{word} {microbatch}" if microbatch >= 0 else word


def _span_args(span: dict[str, int]) -> Event:
    """Return the `args` of a span's Chrome trace event (step, stage, micro-batch, peer, bytes, axis), which viewers
    show for a selected span. `span` has the span's fields by name.
    """
    return {
        **{name: span[name] for name in ("step", "stage", "microbatch", "peer") if span[name] >= 0},
        **({"bytes": span["num_bytes"]} if span["num_bytes"] else {}),
        **({"axis": Axis(span["axis"]).name.lower()} if span["axis"] else {}),
    }


def _thread_ids(event: Event) -> Event:
    """Return the event's `pid` and `tid` alone."""
    return {"pid": event["pid"], "tid": event["tid"]}
