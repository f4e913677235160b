"""What `lmtrain trace` says, as plain data: of a start of the run its clocks, table, replay, path and heat."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lmtrain.errors import UsageError, a_few
from lmtrain.observe.timeline.merge import Segment, Timeline
from lmtrain.observe.timeline.step_time import (
    CLASSES,
    Hop,
    Row,
    StepTimes,
    by_host,
    critical_path,
    heat,
    step_times,
    timeline_rows,
)
from lmtrain.plan.measured import beside_table

Facts = dict[str, Any]


def trace_facts(timeline: Timeline, start: int | None, step: int | None) -> tuple[Facts, list[Row]]:
    """Return the facts, and the bars of the step that is looked at."""
    segment = _chosen(timeline, start)
    facts: Facts = {
        "run": str(timeline.folder),
        "starts": [
            {"start": one.start, "layout": asdict(one.layout), "schedule": one.schedule, "ranks": len(one.headers),
             "world_size": one.layout.world_size, "hosts": one.hosts, "num_microbatches": one.num_microbatches,
             "steps": one.steps, "spans": int(one.spans.size)}
            for one in timeline.segments
        ],
        "notes": [*timeline.notes, *(note for one in timeline.segments for note in one.notes)],
    }
    if not segment.steps:
        if step is not None:
            raise UsageError(f"--step={step} is not there: no step of start {segment.start} was recorded to its end.")
        facts["notes"].append(f"start {segment.start}: no step was recorded to its end, so there are no tables")
        return facts | {"start": segment.start, "steps": []}, []
    if step is not None and step not in segment.steps:
        raise UsageError(
            f"--step={step} is not among the steps that start {segment.start} recorded: "
            f"{a_few(map(str, segment.steps), most=12)}. Choose one of them, or another --start."
        )
    times = step_times(segment)
    longest = np.nanmax(times.seconds.sum(axis=2), axis=1)
    median = times.steps[int(np.argsort(longest, kind="stable")[(len(times.steps) - 1) // 2])]
    chosen = median if step is None else step
    found, beside = heat(segment, times), beside_table(segment, times)
    facts |= {
        "start": segment.start,
        "steps": segment.steps,
        "step_s": float(np.nanmean(times.seconds.sum(axis=2))),
        "classes": _classes(times),
        # because: classes are called pp, dp and tp too, and a rank's place would be gone behind their seconds
        "by_rank": [
            {"rank": rank, "at": _at(segment, rank), "host": segment.headers[rank].host}
            | {name: _number(float(value)) for name, value in zip(CLASSES, row, strict=True)}
            for rank, row in zip(times.ranks, times.by_rank(), strict=True)
        ],
        "replay": None if beside is None else asdict(beside),
        "path": _path(chosen, critical_path(segment, chosen)),
        "heat": [
            {"rank": one.rank, **_at(segment, one.rank), "host": one.host, "own_work_s": _number(one.own_work_s),
             "ratio": _number(one.ratio)}
            for one in found
        ],
        "hosts": {
            host: {"ranks": count, "median": usual, "largest": most}
            for host, (count, usual, most) in by_host(found).items()
        },
        "clocks": _clocks(segment),
    }  # fmt: skip
    return facts, timeline_rows(segment, chosen)


def _chosen(timeline: Timeline, start: int | None) -> Segment:
    """The newest that has a whole step, else the newest."""
    if start is None:
        return next((one for one in reversed(timeline.segments) if one.steps), timeline.segments[-1])
    for one in timeline.segments:
        if one.start == start:
            return one
    there = a_few([str(one.start) for one in timeline.segments], most=12)
    raise UsageError(f"--start={start} has left no trace in {timeline.folder}. Choose one of these: {there}.")


def _at(segment: Segment, rank: int) -> Facts:
    at = segment.at(rank)
    return {"pp": at.pp, "dp": at.dp_replicate * segment.layout.dp_shard + at.dp_shard, "tp": at.tp}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _classes(times: StepTimes) -> Facts:
    mean, waited = times.mean(), times.mean_waited()
    whole = sum(mean.values())
    return {
        name: {"seconds": mean[name], "share": mean[name] / whole if whole else 0.0, "waited_s": waited[name]}
        for name in CLASSES
    }


def _path(step: int, hops: Sequence[Hop]) -> Facts:
    classes: defaultdict[str, float] = defaultdict(float)
    ranks: defaultdict[int, float] = defaultdict(float)
    for hop in hops:
        classes[hop.class_] += hop.seconds
        ranks[hop.rank] += hop.seconds
    return {
        "step": step, "seconds": hops[-1].end_s if hops else 0.0, "classes": dict(classes),
        "ranks": {str(rank): seconds for rank, seconds in sorted(ranks.items())},
        "hops": [
            {"rank": hop.rank, "stage": hop.stage, "microbatch": hop.microbatch, "kind": hop.kind, "class": hop.class_,
             "begin_s": hop.begin_s, "seconds": hop.seconds}
            for hop in hops
        ],
    }  # fmt: skip


def _clocks(segment: Segment) -> list[Facts]:
    """Of each rank: how far its wall clock is ahead of the first rank's, at most, and how it drifts."""
    found = []
    for i, rank in enumerate(segment.ranks):
        ahead = [-float(one.offset_ns[i]) / 1e9 for one in segment.clocks]
        found.append({
            "rank": rank, "ahead_s": max(ahead, key=abs, default=0.0),
            "drift_ppm": -1e6 * float(np.median([one.rate[i] for one in segment.clocks])) if segment.clocks else 0.0,
            "doubt_ms": max((float(one.doubt_ns[i]) / 1e6 for one in segment.clocks), default=0.0),
            "linked": all(bool(one.linked[i]) for one in segment.clocks),
        })  # fmt: skip
    return found
