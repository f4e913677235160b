"""The results of a trace as plain data: times of a step by class and rank, its replay, critical path and clocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lmtrain.errors import UsageError, join_few, leave_out
from lmtrain.observe.timeline.merge_ranks import Segment, Timeline
from lmtrain.observe.timeline.step_breakdown import (
    CLASSES,
    Hop,
    StepTimes,
    TimelineRow,
    critical_path,
    heat_by_host,
    rank_heat,
    step_times,
    timeline_rows,
)
from lmtrain.plan.compare_trace_to_schedule import compare_with_replay

Facts = dict[str, Any]


def trace_facts(timeline: Timeline, start: int | None, step: int | None) -> tuple[Facts, list[TimelineRow]]:
    """Return (facts, rows): the JSON-ready results of a trace, such as step times by class and rank, critical path and
    clocks, and the bars of a timeline of one step. `start` is the start of the run to show, from 1 (None: the newest
    with a whole step), `step` the step (None: the one of median time). Raise UsageError if there is no such start or
    step.
    """
    segment = _choose_segment(timeline, start)
    facts: Facts = {
        "run": str(timeline.folder),
        "starts": [
            {"start": part.start, "layout": asdict(part.layout), "schedule": part.schedule, "ranks": len(part.headers),
             "world_size": part.layout.world_size, "hosts": part.hosts, "num_microbatches": part.num_microbatches,
             "steps": part.steps, "spans": int(part.spans.size)}
            for part in timeline.segments
        ],
        "notes": [*timeline.notes, *(note for part in timeline.segments for note in part.notes)],
    }
    if not segment.steps:
        if step is not None:
            raise UsageError(
                f"--step={step} cannot be shown: start {segment.start} has no completely recorded step. "
                f"{leave_out('--step', shown='Leave --step out')}, or choose another --start."
            )
        facts["notes"].append(f"start {segment.start}: no step was recorded to its end, so there are no tables")
        return facts | {"start": segment.start, "steps": []}, []
    if step is not None and step not in segment.steps:
        raise UsageError(
            f"--step={step} is not among the steps that start {segment.start} recorded: "
            f"{join_few(map(str, segment.steps), max_shown=12)}. Choose one of them, or another --start."
        )
    times = step_times(segment)
    slowest_rank_s = np.nanmax(times.seconds.sum(axis=2), axis=1)
    median = times.steps[int(np.argsort(slowest_rank_s, kind="stable")[(len(times.steps) - 1) // 2])]
    shown_step = median if step is None else step
    heats, replay = rank_heat(segment, times), compare_with_replay(segment, times)
    facts |= {
        "start": segment.start,
        "steps": segment.steps,
        "step_s": float(np.nanmean(times.seconds.sum(axis=2))),
        "classes": _class_facts(times),
        # because: classes are called pp, dp and tp too, and a rank's place would be gone behind their seconds
        "by_rank": [
            {"rank": rank, "at": _coordinate_facts(segment, rank), "host": segment.headers[rank].host}
            | {name: _none_if_nan(float(value)) for name, value in zip(CLASSES, row, strict=True)}
            for rank, row in zip(times.ranks, times.by_rank(), strict=True)
        ],
        "replay": None if replay is None else asdict(replay),
        "path": _path_facts(shown_step, critical_path(segment, shown_step)),
        "heat": [
            {"rank": heat.rank, **_coordinate_facts(segment, heat.rank), "host": heat.host,
             "own_work_s": _none_if_nan(heat.own_work_s), "ratio": _none_if_nan(heat.ratio)}
            for heat in heats
        ],
        "hosts": {
            host: {"ranks": count, "median": median, "largest": largest}
            for host, (count, median, largest) in heat_by_host(heats).items()
        },
        "clocks": _clock_facts(segment),
    }  # fmt: skip
    return facts, timeline_rows(segment, shown_step)


def _choose_segment(timeline: Timeline, start: int | None) -> Segment:
    """Return the part of the trace that start number `start` of the run recorded; for None, that of the newest start
    with a completely recorded step, or if there is none, of the newest. Raise UsageError if that start has no trace.
    """
    if start is None:
        return next((segment for segment in reversed(timeline.segments) if segment.steps), timeline.segments[-1])
    if (segment := next((segment for segment in timeline.segments if segment.start == start), None)) is not None:
        return segment
    raise UsageError(
        f"--start={start} has no trace in {timeline.folder}. Choose one of these starts: "
        f"{join_few((str(segment.start) for segment in timeline.segments), max_shown=12)}."
    )


def _coordinate_facts(segment: Segment, rank: int) -> Facts:
    coordinate = segment.layout.coordinate(rank)
    dp = coordinate.dp_replicate * segment.layout.dp_shard + coordinate.dp_shard
    return {"pp": coordinate.pp, "dp": dp, "tp": coordinate.tp}


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _class_facts(times: StepTimes) -> Facts:
    mean, waited_s = times.mean(), times.mean_waited()
    total_s = sum(mean.values())
    return {
        name: {"seconds": mean[name], "share": mean[name] / total_s if total_s else 0.0, "waited_s": waited_s[name]}
        for name in CLASSES
    }


def _path_facts(step: int, hops: Sequence[Hop]) -> Facts:
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


def _clock_facts(segment: Segment) -> list[Facts]:
    """Return a dict for each rank about its clock compared with the first rank's: the largest difference in seconds and
    its uncertainty, the drift, and whether messages between ranks allowed the comparison.
    """
    rows = []
    for index, rank in enumerate(segment.ranks):
        ahead_s = [-float(window.offset_ns[index]) / 1e9 for window in segment.clocks]
        rates = [window.rate[index] for window in segment.clocks]
        rows.append({
            "rank": rank, "ahead_s": max(ahead_s, key=abs, default=0.0),
            "drift_ppm": -1e6 * float(np.median(rates)) if rates else 0.0,
            "doubt_ms": max((float(window.doubt_ns[index]) / 1e6 for window in segment.clocks), default=0.0),
            "linked": all(bool(window.linked[index]) for window in segment.clocks),
        })  # fmt: skip
    return rows
