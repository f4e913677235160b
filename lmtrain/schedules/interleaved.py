"""Interleaved 1F1B (Megatron-LM 2021): each rank holds several stages, and the bubble shrinks by their number.

Microbatches pass in groups of at least as many as there are ranks: a rank runs a group through its first stage, then
through its second, and so on. Where the ranks do not divide the microbatches, the first groups are larger by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind


class Interleaved(PipelineSchedule):
    kind: ClassVar[str] = "interleaved"
    chunks: ClassVar[int] = 2
    rule: ClassVar[str] = "needs two stages a rank or more"

    def allows(self, chunks: int) -> bool:
        return chunks > 1

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        num_groups = max(num_microbatches // num_ranks, 1)
        size, larger = divmod(num_microbatches, num_groups)
        firsts = [group * size + min(group, larger) for group in range(num_groups + 1)]
        turns = [
            (chunk, m) for first, stop in pairwise(firsts) for chunk in range(chunks) for m in range(first, stop)
        ]
        forwards = [Action(Kind.FORWARD, chunk * num_ranks + rank, m) for chunk, m in turns]
        backwards = [Action(Kind.BACKWARD, (chunks - 1 - chunk) * num_ranks + rank, m) for chunk, m in turns]
        # because: the first backward comes after its microbatch has gone through all ranks once more for each chunk
        ahead = min(2 * (num_ranks - rank - 1) + (chunks - 1) * firsts[1], len(forwards))
        row = forwards[:ahead]
        for number, backward in enumerate(backwards):
            row += forwards[ahead + number : ahead + number + 1]
            row.append(backward)
        return row
