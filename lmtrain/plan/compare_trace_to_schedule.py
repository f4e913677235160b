"""Comparison of a traced step with its pipeline schedule, simulated with the measured durations.

Called by `lmtrain trace`. Idle time that the simulation shows too comes from the schedule: the closed form for even
stages, plus the effect of uneven stages and of messages. Idle time beyond the simulation comes from jitter and from
ranks that deviate from the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.config.settings_base import kinds
from lmtrain.observe.spans.span_file import Flag
from lmtrain.observe.spans.span_file import Kind as SpanKind
from lmtrain.observe.timeline.merge_ranks import Segment, message_pairs
from lmtrain.observe.timeline.step_breakdown import BUBBLE, MESSAGES, StepTimes
from lmtrain.schedules.pipeline_schedule import PipelineSchedule, schedule_named
from lmtrain.schedules.schedule_simulator import Costs, Timeline, simulate
from lmtrain.schedules.table import Kind, ScheduleTable

_KINDS = {
    SpanKind.FORWARD: Kind.FORWARD, SpanKind.BACKWARD: Kind.BACKWARD, SpanKind.INPUT: Kind.INPUT,
    SpanKind.WEIGHT: Kind.WEIGHT,
}  # fmt: skip
ActionSeconds = dict[tuple[Kind, int], float]  # (kind, stage) -> seconds


@dataclass(frozen=True)
class ReplayComparison:
    """Measured and simulated seconds of a step: medians over steps, means over ranks."""

    num_microbatches: int
    pipeline_s: float  # from the start of the first action to the end of the last
    replayed_pipeline_s: float
    bubble_s: float  # includes messages, which the table does not separate from the bubble
    replayed_bubble_s: float
    even_bubble_s: float  # the closed form, for equal stages and messages that take no time
    send_s: float  # of a message, from the send to its arrival
    by_pp: list[tuple[float, float]]  # (measured bubble, replayed bubble) of each pipeline rank


def compare_with_replay(segment: Segment, times: StepTimes) -> ReplayComparison | None:
    """Simulate the pipeline schedule of a traced run with the measured durations of its actions, and return the
    measured and the simulated seconds of the pipeline and of its bubble. `times` names the steps to compare. Return
    None if there is no pipeline, the schedule is unknown (a plugin's needs --plugin) or the trace lacks actions.
    """
    layout = segment.layout
    if layout.pp == 1 or segment.schedule not in kinds(PipelineSchedule) or not times.steps:
        return None
    spans = segment.spans[np.isin(segment.spans["step"], times.steps)]
    work = spans[np.isin(spans["kind"], [*_KINDS]) & (spans["flags"] & Flag.ASIDE == 0)]
    if not work.size:
        return None
    num_microbatches, send_s = int(work["microbatch"].max()) + 1, _median_send_s(spans)
    table = schedule_named(segment.schedule).table(layout.pp, layout.vp, num_microbatches)
    costs = _median_action_seconds(work, layout.dp * layout.tp)
    actions = {(action.kind, action.stage) for row in table.actions for action in row}
    if any(actions - seconds.keys() for seconds in costs):
        return None  # because: a rank is missing from the trace, or followed another table
    replays = [_replay(table, seconds, send_s) for seconds in costs]
    makespan = max(replay.makespan for replay in replays)  # because: all pipelines synchronize at the end of a step
    mean = {
        kind: float(np.mean([seconds[k, stage] for seconds in costs for k, stage in seconds if k is kind]))
        for kind, _ in actions
    }
    even = simulate(table, cost_of=lambda action: mean[action.kind])
    bubbles = np.nanmedian(times.seconds[:, :, [BUBBLE, MESSAGES]].sum(axis=2), axis=0)
    pp_of = np.array([segment.layout.coordinate(rank).pp for rank in times.ranks])
    measured = [float(np.nanmean(bubbles[pp_of == pp])) for pp in range(layout.pp)]
    replayed = [float(np.mean([makespan - replay.busy[pp] for replay in replays])) for pp in range(layout.pp)]
    return ReplayComparison(
        num_microbatches, _median_pipeline_s(work), makespan, float(np.mean(measured)), float(np.mean(replayed)),
        float(np.mean([even.makespan - busy for busy in even.busy])), send_s,
        list(zip(measured, replayed, strict=True)),
    )  # fmt: skip


def _replay(table: ScheduleTable, costs: ActionSeconds, send_s: float) -> Timeline:
    """Simulate the schedule table with these seconds per action and per message."""
    return simulate(table, Costs(send=send_s), lambda action: costs[action.kind, action.stage])


def _median_action_seconds(work: NDArray[Any], num_pipelines: int) -> list[ActionSeconds]:
    """Return a list with a dict for each of the `num_pipelines` pipelines (data- and tensor-parallel copies): (kind of
    action, stage) -> median seconds over micro-batches and steps. They include collectives during the action. `work`
    holds the traced spans of forwards and backwards.
    """
    durations: list[defaultdict[tuple[Kind, int], list[float]]] = [defaultdict(list) for _ in range(num_pipelines)]
    for rank, kind, stage, begin, end in work[["rank", "kind", "stage", "begin_ns", "end_ns"]].tolist():
        durations[rank % num_pipelines][_KINDS[SpanKind(kind)], stage].append((end - begin) / 1e9)
    return [
        {key: float(np.median(lengths)) for key, lengths in lengths_by_action.items()}
        for lengths_by_action in durations
    ]


def _median_send_s(spans: NDArray[Any]) -> float:
    """Return the median seconds from the start of sending a pipeline message to its receipt; 0 if there is no such
    message. Only messages for which the receiver was already waiting are counted, since `spans`, the traced spans, do
    not show when others arrived.
    """
    sent, received = message_pairs(spans)
    begin, end = spans["begin_ns"], spans["end_ns"]
    lengths = (end[received] - begin[sent])[begin[sent] > begin[received]]
    return float(np.median(lengths)) / 1e9 if lengths.size else 0.0


def _median_pipeline_s(work: NDArray[Any]) -> float:
    """Return the median over steps of the seconds from the start of the first forward to the end of the last backward.
    `work` holds the traced spans of forwards and backwards of all pipelines.
    """
    steps, which = np.unique(work["step"], return_inverse=True)
    first, last = np.full(steps.size, np.iinfo(np.int64).max), np.zeros(steps.size, np.int64)
    np.minimum.at(first, which, work["begin_ns"])
    np.maximum.at(last, which, work["end_ns"])
    return float(np.median((last - first) / 1e9))
