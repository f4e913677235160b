"""1F1B: a few forwards to fill the pipeline, then a forward and a backward in turn, then the backwards that are left.

As long a bubble as GPipe's, but a rank holds the activations of at most as many microbatches as ranks follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind


class OneFOneB(PipelineSchedule):
    kind: ClassVar[str] = "1f1b"

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        ahead = min(num_ranks - rank - 1, num_microbatches)
        row = [Action(Kind.FORWARD, rank, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if m + ahead < num_microbatches:
                row.append(Action(Kind.FORWARD, rank, m + ahead))
            row += self.backward(rank, m)
        return row

    def backward(self, rank: int, m: int) -> list[Action]:
        """What follows the forward that makes room for this microbatch's gradient."""
        return [Action(Kind.BACKWARD, rank, m)]
