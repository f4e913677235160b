"""A Timeline in the trace event format of ui.perfetto.dev and chrome://tracing.

Called by `lmtrain trace`. A host is shown as a process; a rank has a thread for itself and one for each of its stages.
Arrows go from each send to its receive. The starts of a run follow each other in time. A file whose name ends in .gz is
compressed.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmtrain.observe.spans.format import Axis, Flag, Kind
from lmtrain.observe.timeline.merge import Segment, Timeline, messages
from lmtrain.runtime.files.files import atomic_file, json_bytes, storage_errors

_ACTIONS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
_NO_STAGE, _ASIDE = -1, 1 << 20  # stand-ins for a stage: none; lanes (a thread each) beside the computation
_WORDS = {Kind.INPUT: "backward, inputs", Kind.WEIGHT: "backward, weights"}

Event = dict[str, Any]


class _Threads:
    """The numbers of processes and threads, and the metadata events that name them."""

    def __init__(self) -> None:
        self.processes: dict[str, int] = {}
        self.threads: dict[tuple[int, int, int], int] = {}  # (start, rank, stage)
        self.named: list[Event] = []

    def of(self, segment: Segment, rank: int, stage: int) -> tuple[int, int]:
        host = segment.headers[rank].host
        if host not in self.processes:
            pid = self.processes[host] = len(self.processes) + 1
            self._name(pid, 0, "process", f"host {host}", pid)
        pid, key = self.processes[host], (segment.start, rank, stage)
        if key not in self.threads:
            tid = self.threads[key] = len(self.threads) + 1
            at = segment.at(rank)
            dp = at.dp_replicate * segment.layout.dp_shard + at.dp_shard
            what = f"(pp {at.pp}, dp {dp}, tp {at.tp})" if stage == _NO_STAGE else f"stage {stage}"
            what = f"beside {stage - _ASIDE}" if stage >= _ASIDE else what
            start = f"start {segment.start}: " if segment.start > 1 else ""
            order = (segment.start << 40) + (rank << 21) + stage + 1
            self._name(pid, tid, "thread", f"{start}rank {rank} {what}", order)
        return pid, self.threads[key]

    def _name(self, pid: int, tid: int, what: str, name: str, order: int) -> None:
        for word, about in (("name", {"name": name}), ("sort_index", {"sort_index": order})):
            self.named.append({"ph": "M", "name": f"{what}_{word}", "pid": pid, "tid": tid, "ts": 0, "args": about})


def trace_events(timeline: Timeline) -> Iterator[Event]:
    threads = _Threads()
    filled = [segment for segment in timeline.segments if segment.spans.size]
    origin = min((int(segment.spans["begin_ns"].min()) for segment in filled), default=0)
    flow = 0
    for segment in filled:
        events = _slices(segment, threads, origin)
        yield from events.values()
        sent, received = messages(segment.spans)
        for send, receive in zip(sent.tolist(), received.tolist(), strict=True):
            begun, ended = events[send], events[receive]
            flow += 1
            both = {"cat": "message", "name": "message", "id": flow}
            yield {"ph": "s", **both, **_where(begun), "ts": begun["ts"]}
            # because: a slice excludes its own end, and an arrow ends in the slice that contains it
            late = ended["ts"] + ended["dur"] - 0.001 if ended["dur"] else ended["ts"]
            yield {"ph": "f", "bp": "e", **both, **_where(ended), "ts": round(late, 3)}
    yield from threads.named


def write_trace(timeline: Timeline, path: Path) -> None:
    began = min((int(s.spans["begin_ns"].min()) for s in timeline.segments if s.spans.size), default=0)
    about = {
        "run": str(timeline.folder), "began": datetime.fromtimestamp(began / 1e9, UTC).isoformat(),
        "notes": [*timeline.notes, *(note for segment in timeline.segments for note in segment.notes)],
    }  # fmt: skip
    with storage_errors(path, "Writing"), ExitStack() as stack:
        plain = stack.enter_context(atomic_file(path))
        packed = stack.enter_context(gzip.GzipFile("", "wb", 6, plain, 0)) if path.suffix == ".gz" else None
        write = plain.write if packed is None else packed.write
        write(b'{"displayTimeUnit": "ms", "otherData": ' + json_bytes(about) + b', "traceEvents": [\n')
        for number, event in enumerate(trace_events(timeline)):
            write((b",\n" if number else b"") + json_bytes(event))
        write(b"\n]}\n")


def _slices(segment: Segment, threads: _Threads, origin: int) -> dict[int, Event]:
    """Return an event per span, by its index; on each thread two slices are nested or do not overlap."""
    found: dict[int, Event] = {}
    open_: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by thread: (end, stage) of the open spans
    lanes: dict[int, list[int]] = {}  # by rank: the end of each lane's last span
    last_stage: dict[int, int] = {}
    action_end: dict[int, int] = {}
    names = segment.spans.dtype.names or ()
    for place, values in enumerate(segment.spans.tolist()):
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
        thread = threads.of(segment, rank, stage)
        around = open_.setdefault(thread, [])
        while around and around[-1][0] <= begin:
            around.pop()
        end = min(end, around[-1][0]) if around else end
        around.append((end, stage))
        found[place] = {
            "ph": "X", "name": _name(segment, span), "cat": Kind(kind).name.lower(),
            "ts": (begin - origin) / 1000, "dur": (end - begin) / 1000, "pid": thread[0], "tid": thread[1],
            "args": _about(span),
        }  # fmt: skip
    return found


def _name(segment: Segment, span: dict[str, int]) -> str:
    kind, microbatch = Kind(span["kind"]), span["microbatch"]
    if kind == Kind.STEP:
        return f"step {span['step']}"
    if span["name"]:
        return segment.names[span["name"]]
    word = _WORDS.get(kind, kind.name.lower())
    return f"{word} {microbatch}" if microbatch >= 0 else word


def _about(span: dict[str, int]) -> Event:
    return {
        **{name: span[name] for name in ("step", "stage", "microbatch", "peer") if span[name] >= 0},
        **({"bytes": span["num_bytes"]} if span["num_bytes"] else {}),
        **({"axis": Axis(span["axis"]).name.lower()} if span["axis"] else {}),
    }


def _where(event: Event) -> Event:
    return {"pid": event["pid"], "tid": event["tid"]}
