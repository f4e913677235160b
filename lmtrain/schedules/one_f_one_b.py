"""1F1B: a few forwards to fill the pipeline, then a forward and a backward in turn, then the backwards that are left.

As long a bubble as GPipe's, but a rank holds the activations of at most as many microbatches as ranks follow it.
"""

from __future__ import annotations

from lmtrain.schedules.table import Action, Kind, Table, looping


def build(num_ranks: int, num_microbatches: int) -> Table:
    return Table(
        looping(num_ranks), num_microbatches,
        tuple(_row(rank, num_ranks - rank - 1, num_microbatches) for rank in range(num_ranks)),
    )  # fmt: skip


def _row(rank: int, ahead: int, num_microbatches: int) -> tuple[Action, ...]:
    ahead = min(ahead, num_microbatches)
    row = [Action(Kind.FORWARD, rank, m) for m in range(ahead)]
    for m in range(num_microbatches):
        if m + ahead < num_microbatches:
            row.append(Action(Kind.FORWARD, rank, m + ahead))
        row.append(Action(Kind.BACKWARD, rank, m))
    return tuple(row)
