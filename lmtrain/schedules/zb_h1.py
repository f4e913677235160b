"""ZB-H1 (zero-bubble pipelining, handcrafted): 1F1B with backwards in halves, the weights' halves put off.

Rank r is r weight halves behind: that fills the gap in which 1F1B waits for gradients. The bubble is
(p - 1)(F + I - W) where 1F1B's is (p - 1)(F + I + W), and every rank holds p microbatches, as 1F1B's first does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind


class ZBH1(PipelineSchedule):
    kind: ClassVar[str] = "zb_h1"
    splits_backward: ClassVar[bool] = True

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        ahead = min(num_ranks - rank - 1, num_microbatches)
        row = [Action(Kind.FORWARD, rank, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if m + ahead < num_microbatches:
                row.append(Action(Kind.FORWARD, rank, m + ahead))
            row.append(Action(Kind.INPUT, rank, m))
            if m >= rank:
                row.append(Action(Kind.WEIGHT, rank, m - rank))
        behind = range(max(num_microbatches - rank, 0), num_microbatches)
        return [*row, *(Action(Kind.WEIGHT, rank, m) for m in behind)]
