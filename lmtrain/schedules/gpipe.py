"""GPipe: all forwards, then all backwards. Simple, and every microbatch's activations are held at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind


class GPipe(PipelineSchedule):
    kind: ClassVar[str] = "gpipe"

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        return [Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(num_microbatches)]
