"""1F1B with one more forward ahead on every rank, which hides slow messages and holds one microbatch more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind


class Eager(PipelineSchedule):
    kind: ClassVar[str] = "eager"

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        forwards = [Action(Kind.FORWARD, rank, m) for m in range(num_microbatches)]
        ahead = num_ranks - rank
        row = forwards[:ahead]
        for m in range(num_microbatches):
            row += [*forwards[ahead + m : ahead + m + 1], Action(Kind.BACKWARD, rank, m)]
        return row
