"""ZB-H1 (zero-bubble pipelining, handcrafted): 1F1B with backwards in halves, the weights' halves put off.

Rank r is r weight halves behind: that fills the gap in which 1F1B waits for gradients. The bubble is
(p - 1)(F + I - W) where 1F1B's is (p - 1)(F + I + W), and every rank holds p microbatches, as 1F1B's first does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lmtrain.schedules.one_f_one_b import OneFOneB
from lmtrain.schedules.table import Action, Kind


class ZBH1(OneFOneB):
    kind: ClassVar[str] = "zb_h1"
    splits_backward: ClassVar[bool] = True

    def row(self, rank: int, num_ranks: int, chunks: int, num_microbatches: int) -> Sequence[Action]:
        row = super().row(rank, num_ranks, chunks, num_microbatches)
        behind = range(max(num_microbatches - rank, 0), num_microbatches)
        return [*row, *(Action(Kind.WEIGHT, rank, m) for m in behind)]

    def backward(self, rank: int, m: int) -> list[Action]:
        put_off = [Action(Kind.WEIGHT, rank, m - rank)] if m >= rank else []
        return [Action(Kind.INPUT, rank, m), *put_off]
