"""ZB-H1 (zero-bubble pipelining, handcrafted): 1F1B with backwards in halves, the weights' halves put off.

Rank r is r weight halves behind: that fills the gap in which 1F1B waits for gradients. The bubble is
(p - 1)(F + I - W) where 1F1B's is (p - 1)(F + I + W), and every rank holds p microbatches, as 1F1B's first does.
"""

from __future__ import annotations

from lmtrain.schedules.table import Action, Kind, Table, looping


def build(num_ranks: int, num_microbatches: int) -> Table:
    rows = tuple(_row(rank, num_ranks - rank - 1, num_microbatches) for rank in range(num_ranks))
    return Table(looping(num_ranks), num_microbatches, rows)


def _row(rank: int, ahead: int, num_microbatches: int) -> tuple[Action, ...]:
    ahead = min(ahead, num_microbatches)
    row = [Action(Kind.FORWARD, rank, m) for m in range(ahead)]
    for m in range(num_microbatches):
        if m + ahead < num_microbatches:
            row.append(Action(Kind.FORWARD, rank, m + ahead))
        row.append(Action(Kind.INPUT, rank, m))
        if m >= rank:
            row.append(Action(Kind.WEIGHT, rank, m - rank))
    behind = range(max(num_microbatches - rank, 0), num_microbatches)
    return (*row, *(Action(Kind.WEIGHT, rank, m) for m in behind))
