"""GPipe: all forwards, then all backwards. Simple, and every microbatch's activations are held at once."""

from __future__ import annotations

from lmtrain.schedules.table import Action, Kind, Table, looping


def build(num_ranks: int, num_microbatches: int) -> Table:
    rows = tuple(
        tuple(Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(num_microbatches))
        for rank in range(num_ranks)
    )
    return Table(looping(num_ranks), num_microbatches, rows)
