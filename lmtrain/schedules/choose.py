"""Which schedules there are, by their words, and what each allows. Called by settings, parallel/pipeline and plan."""

from __future__ import annotations

from typing import Literal, get_args

from lmtrain.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from lmtrain.schedules.table import Table, folded, looping

Name = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]
NAMES: tuple[Name, ...] = get_args(Name)
SPLITS_BACKWARD = frozenset({"zb_h1", "zb_v"})  # run I and W apart


def legal_chunks(name: Name, chunks: int) -> str | None:
    """Stages a rank may hold: None where this number is legal, else the rule."""
    if name == "interleaved":
        return None if chunks > 1 else "needs two stages a rank or more"
    if name == "zb_v":
        return None if chunks == 2 else "has exactly two stages a rank"
    return None if chunks == 1 else "has one stage a rank"


def ranks_of_stages(name: Name, num_ranks: int, chunks: int) -> tuple[int, ...]:
    return folded(num_ranks) if name == "zb_v" else looping(num_ranks, chunks)


def build(name: Name, num_ranks: int, chunks: int, num_microbatches: int) -> Table:
    rule = legal_chunks(name, chunks)
    if rule is not None:
        raise ValueError(f"the schedule {name} {rule}, not {chunks}")
    match name:
        case "gpipe":
            return gpipe.build(num_ranks, num_microbatches)
        case "1f1b":
            return one_f_one_b.build(num_ranks, num_microbatches)
        case "interleaved":
            return interleaved.build(num_ranks, num_microbatches, chunks)
        case "zb_h1":
            return zb_h1.build(num_ranks, num_microbatches)
        case "zb_v":
            return zb_v.build(num_ranks, num_microbatches)
