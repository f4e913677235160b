"""How long each rank's own work takes in a step, beside the ranks of the same stages: who is hot.

Called by `lmtrain trace` and the report. Own work is what no other rank can hold up: forward, backward and the update,
without collectives and messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtrain.layout import Coordinate
from lmtrain.observe.timeline.merge import Segment
from lmtrain.observe.timeline.step_time import COMPUTE, OPTIMIZER, StepTimes


@dataclass(frozen=True)
class Heat:
    rank: int
    at: Coordinate
    host: str
    own_work_s: float  # of a step: the median of the steps; NaN without a whole step
    ratio: float  # to the median of the ranks with the same pp coordinate, which hold the same stages


def heat(segment: Segment, times: StepTimes) -> list[Heat]:
    """By rank."""
    own = np.nansum(times.seconds[:, :, [COMPUTE, OPTIMIZER]], axis=2)
    own[np.isnan(times.seconds[:, :, COMPUTE])] = np.nan
    seen = ~np.isnan(own).all(axis=0) if own.size else np.zeros(len(times.ranks), bool)
    work = np.full(len(times.ranks), np.nan)
    work[seen] = np.nanmedian(own[:, seen], axis=0)
    stage = np.array([segment.at(rank).pp for rank in times.ranks])
    usual = {pp: np.median(work[seen & (stage == pp)]) for pp in set(stage[seen].tolist())}
    return [
        Heat(rank, segment.at(rank), segment.headers[rank].host, float(one), float(one / usual.get(int(pp), np.nan)))
        for rank, one, pp in zip(times.ranks, work, stage, strict=True)
    ]


def by_host(found: list[Heat]) -> dict[str, tuple[int, float, float]]:
    """(ranks, median ratio, largest ratio) of each host, the hottest first."""
    hosts: dict[str, list[float]] = {}
    for one in found:
        if not np.isnan(one.ratio):
            hosts.setdefault(one.host, []).append(one.ratio)
    rows = {host: (len(ratios), float(np.median(ratios)), max(ratios)) for host, ratios in hosts.items()}
    return dict(sorted(rows.items(), key=lambda row: -row[1][1]))
