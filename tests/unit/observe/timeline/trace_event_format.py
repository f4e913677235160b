"""The rules of the trace event format, as its public description has them: `problems(document)` of a file's JSON.

Called by tests. Of the phases of events those that lmtrain writes are known (complete, flow, metadata); of the rules
also those that a viewer does not say aloud: slices of a thread nest, and both ends of an arrow lie in a slice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

_NUMBER = (int, float)
_KEYS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "cat": str, "ts": _NUMBER, "dur": _NUMBER, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": (int, str), "ts": _NUMBER, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "id": (int, str), "ts": _NUMBER, "pid": int, "tid": int, "bp": str},
    "M": {"name": str, "pid": int, "tid": int, "ts": _NUMBER, "args": dict},
}
_METADATA = {
    "process_name": ("name", str), "process_sort_index": ("sort_index", int), "process_labels": ("labels", str),
    "thread_name": ("name", str), "thread_sort_index": ("sort_index", int),
}  # fmt: skip
_UNITS = ("ms", "ns")
_EXACT = 1e-6  # microseconds: what a number of a file may be off by

Event = dict[str, Any]


def problems(document: Any) -> list[str]:
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["is no object with a list of traceEvents"]
    found = []
    if document.get("displayTimeUnit", "ms") not in _UNITS:
        found.append(f"displayTimeUnit is {document['displayTimeUnit']}")
    events = document["traceEvents"]
    wrong = [(event, said) for event in events for said in _wrong(event)]
    if wrong:
        return [f"{said}: {event}" for event, said in wrong[:20]]
    return [*found, *_names(events), *_nesting(events), *_flows(events)]


def _wrong(event: Event) -> Iterator[str]:
    keys = _KEYS.get(event.get("ph", ""))
    if keys is None:
        yield "no known phase"
        return
    for key, kind in keys.items():
        if not isinstance(event.get(key), kind) or isinstance(event[key], bool):
            yield f"{key} is not there, or not of its type"
    if set(event) - set(keys) - {"ph"}:
        yield "keys that the phase does not have"
    if any(isinstance(event.get(key), _NUMBER) and event[key] < 0 for key in ("ts", "dur")):
        yield "a time below 0"
    if event["ph"] == "f" and event.get("bp") != "e":
        yield "an arrow that does not end in the slice around it"
    if event["ph"] == "M":
        name, kind = _METADATA.get(event.get("name", ""), ("", object))
        if not name or not isinstance(event.get("args", {}).get(name), kind):
            yield "metadata that nobody knows"


def _names(events: list[Event]) -> Iterator[str]:
    """Each process and thread has a name, each thread number one process."""
    named = {(e["name"], e["pid"], e["tid"] if e["name"] == "thread_name" else 0) for e in events if e["ph"] == "M"}
    of_thread: dict[int, int] = {}
    for event in events:
        if event["ph"] != "M":
            if ("process_name", event["pid"], 0) not in named:
                yield f"process {event['pid']} has no name"
            if ("thread_name", event["pid"], event["tid"]) not in named:
                yield f"thread {event['tid']} has no name"
            if of_thread.setdefault(event["tid"], event["pid"]) != event["pid"]:
                yield f"thread {event['tid']} is of two processes"


def _nesting(events: list[Event]) -> Iterator[str]:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        around: list[float] = []
        for one in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1] <= one["ts"] + _EXACT:
                around.pop()
            end = one["ts"] + one["dur"]
            if around and end > around[-1] + _EXACT:
                yield f"ends after the slice around it: {one}"
            around.append(end)


def _flows(events: list[Event]) -> Iterator[str]:
    """Each arrow has one beginning and one end, not before it, both within a slice of their thread."""
    ends: dict[Any, dict[str, list[Event]]] = defaultdict(lambda: {"s": [], "f": []})
    slices = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["name"], event["id"]][event["ph"]].append(event)
        elif event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for key, of in ends.items():
        if len(of["s"]) != 1 or len(of["f"]) != 1:
            yield f"arrow {key} has {len(of['s'])} beginnings and {len(of['f'])} ends"
            continue
        (begin,), (end,) = of["s"], of["f"]
        if end["ts"] < begin["ts"]:
            yield f"arrow {key} ends before it begins"
        for one in (begin, end):
            inside = (low - _EXACT <= one["ts"] <= high + _EXACT for low, high in slices[one["pid"], one["tid"]])
            if not any(inside):
                yield f"arrow {key} has an end in no slice: {one}"
