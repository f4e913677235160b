"""What a pipeline schedule is, and how one is found by its word. No torch.

Called by placement, parallel/pipeline and the planner. A schedule is one file with one class: beside this one, or a
plugin's `*_schedule.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lmtrain.config.base import Choice, kinds
from lmtrain.schedules.table import Action, Table, looping


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule(Choice):
    room: ClassVar[str] = "lmtrain.schedules"
    files: ClassVar[str] = ""

    chunks: ClassVar[int] = 1  # stages a rank has, where one number has to be named
    rule: ClassVar[str] = "has one stage a rank"
    splits_backward: ClassVar[bool] = False  # runs I and W apart

    def allows(self, chunks: int) -> bool:
        return chunks == self.chunks

    def ranks_of_stages(self, num_ranks: int, chunks: int) -> tuple[int, ...]:
        return looping(num_ranks, chunks)

    @abstractmethod
    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        """What one rank does, in order."""

    def table(self, num_ranks: int, chunks: int, num_microbatches: int) -> Table:
        if not self.allows(chunks):
            raise ValueError(f"the schedule {self.kind} {self.rule}, not {chunks}")
        rows = (tuple(self.row(rank, num_ranks, chunks, num_microbatches)) for rank in range(num_ranks))
        return Table(self.ranks_of_stages(num_ranks, chunks), num_microbatches, tuple(rows))


def schedule_named(word: str) -> PipelineSchedule:
    schedule = kinds(PipelineSchedule)[word]()
    assert isinstance(schedule, PipelineSchedule)
    return schedule
