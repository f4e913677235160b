"""ZB-V (zero-bubble pipelining): two stages a rank, folded as a V, backwards in halves.

A microbatch goes down the ranks and up again, so that its first gradient starts on the first rank, where it is needed
last. Where F, I and W take the same time and there are at least 2p microbatches, no rank waits between its first
action and its last. A rank holds 2p half-size stages' activations: as many as 1F1B's first rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind, folded


class _Row:
    """One rank's actions; each kind takes its stage's microbatches in order."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.count = {(kind, chunk): 0 for kind in Kind for chunk in (0, 1)}
        self.actions: list[Action] = []

    def add(self, chunk: int, *kinds: Kind) -> None:
        for kind in kinds:
            self.actions.append(Action(kind, self.stages[chunk], self.count[kind, chunk]))
            self.count[kind, chunk] += 1


class ZBV(PipelineSchedule):
    kind: ClassVar[str] = "zb_v"
    chunks: ClassVar[int] = 2
    rule: ClassVar[str] = "has exactly two stages a rank"
    splits_backward: ClassVar[bool] = True

    def ranks_of_stages(self, num_ranks: int, chunks: int) -> tuple[int, ...]:
        return folded(num_ranks)

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        f, i, w = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT
        row, after = _Row(rank, num_ranks), num_ranks - rank
        count = row.count
        # what the pattern needs; microbatches that are not there fall out
        total = max(num_microbatches, 2 * num_ranks - 1)
        for _ in range(2 * after - 1):  # down, until the first comes back up
            row.add(0, f)
        for _ in range(rank):
            row.add(1, f)
            row.add(0, f)
        for _ in range(after):
            row.add(1, f, i, w)
        while count[f, 1] < count[f, 0] or count[f, 0] < total:  # steady: each stage a forward and a backward in turn
            if count[f, 0] < total:
                row.add(0, f)
            row.add(0, i, w)
            row.add(1, f, i, w)
        for _ in range(rank):  # gradients first: the ranks before wait for them
            row.add(0, i)
            row.add(1, i)
        for _ in range(after):
            row.add(0, i, w)
        for chunk in (1, 0):
            while count[w, chunk] < count[i, chunk]:
                row.add(chunk, w)
        return [action for action in row.actions if action.microbatch < num_microbatches]
