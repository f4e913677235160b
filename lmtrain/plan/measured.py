"""A traced step beside its schedule's table, replayed with the costs that were measured.

Called by `lmtrain trace`. What the replay has too is the schedule's own: the closed form where stages are even, and
what uneven stages and messages add. What it lacks is jitter, and whatever keeps ranks from going by the table.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.config.base import kinds
from lmtrain.observe.spans.format import Flag
from lmtrain.observe.spans.format import Kind as SpanKind
from lmtrain.observe.timeline.merge import Segment, messages
from lmtrain.observe.timeline.step_time import BUBBLE, MESSAGES, StepTimes
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from lmtrain.schedules.simulate import Costs, Timeline, simulate
from lmtrain.schedules.table import Kind, Table

_KINDS = {
    SpanKind.FORWARD: Kind.FORWARD, SpanKind.BACKWARD: Kind.BACKWARD, SpanKind.INPUT: Kind.INPUT,
    SpanKind.WEIGHT: Kind.WEIGHT,
}  # fmt: skip
Costing = dict[tuple[Kind, int], float]  # by kind and stage


@dataclass(frozen=True)
class Beside:
    """Seconds of a step: medians of the steps, means of the ranks."""

    num_microbatches: int
    pipeline_s: float  # from the first action to the last one's end
    replayed_pipeline_s: float
    bubble_s: float  # with the messages, which the table does not tell from it
    replayed_bubble_s: float
    even_bubble_s: float  # with stages of the same length and messages that take no time: the closed form
    send_s: float  # of a message, from when it is sent until it is there
    by_pp: list[tuple[float, float]]  # (bubble, replayed), of each rank along pp


def beside_table(segment: Segment, times: StepTimes) -> Beside | None:
    """None without a pipeline, or where its schedule is not known here (a plugin's is, with --plugin)."""
    layout = segment.layout
    if layout.pp == 1 or segment.schedule not in kinds(PipelineSchedule) or not times.steps:
        return None
    spans = segment.spans[np.isin(segment.spans["step"], times.steps)]
    work = spans[np.isin(spans["kind"], [*_KINDS]) & (spans["flags"] & Flag.ASIDE == 0)]
    if not work.size:
        return None
    count, send_s = int(work["microbatch"].max()) + 1, _send_s(spans)
    table = schedule_named(segment.schedule).table(layout.pp, layout.vp, count)
    costs = _costs(work, layout.dp * layout.tp)
    actions = {(action.kind, action.stage) for row in table.actions for action in row}
    if any(actions - of.keys() for of in costs):
        return None  # because: a rank is missing, or goes by another table
    replays = [_replay(table, of, send_s) for of in costs]
    last = max(one.makespan for one in replays)  # because: all pipelines meet at the end of a step
    mean = {kind: float(np.mean([of[k, stage] for of in costs for k, stage in of if k is kind])) for kind, _ in actions}
    even = simulate(table, cost=lambda action: mean[action.kind])
    bubbles = np.nanmedian(times.seconds[:, :, [BUBBLE, MESSAGES]].sum(axis=2), axis=0)
    pp_of = np.array([segment.at(rank).pp for rank in times.ranks])
    own = [float(np.nanmean(bubbles[pp_of == pp])) for pp in range(layout.pp)]
    waits = [float(np.mean([last - one.busy[pp] for one in replays])) for pp in range(layout.pp)]
    return Beside(
        count, _pipeline_s(work), last, float(np.mean(own)), float(np.mean(waits)),
        float(np.mean([even.makespan - busy for busy in even.busy])), send_s, list(zip(own, waits, strict=True)),
    )  # fmt: skip


def _replay(table: Table, costs: Costing, send_s: float) -> Timeline:
    return simulate(table, Costs(send=send_s), lambda action: costs[action.kind, action.stage])


def _costs(work: NDArray[Any], num_pipelines: int) -> list[Costing]:
    """Return for each pipeline the median seconds of each kind and stage, with the collectives within."""
    found: list[defaultdict[tuple[Kind, int], list[float]]] = [defaultdict(list) for _ in range(num_pipelines)]
    for rank, kind, stage, begin, end in work[["rank", "kind", "stage", "begin_ns", "end_ns"]].tolist():
        found[rank % num_pipelines][_KINDS[SpanKind(kind)], stage].append((end - begin) / 1e9)
    return [{key: float(np.median(lengths)) for key, lengths in of.items()} for of in found]


def _send_s(spans: NDArray[Any]) -> float:
    """Return the median seconds of messages that a receiver waited for; others had arrived before."""
    sent, received = messages(spans)
    begin, end = spans["begin_ns"], spans["end_ns"]
    lengths = (end[received] - begin[sent])[begin[sent] > begin[received]]
    return float(np.median(lengths)) / 1e9 if lengths.size else 0.0


def _pipeline_s(work: NDArray[Any]) -> float:
    """Return the median seconds of a step, from the first action of all pipelines to the end of the last."""
    steps, which = np.unique(work["step"], return_inverse=True)
    first, last = np.full(steps.size, np.iinfo(np.int64).max), np.zeros(steps.size, np.int64)
    np.minimum.at(first, which, work["begin_ns"])
    np.maximum.at(last, which, work["end_ns"])
    return float(np.median((last - first) / 1e9))
