"""A slow rank or link in words, for the log and the views. Called by train/pace and by who reads rows of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.observe.stragglers.judge import Slow

_AXES = ("pp", "dp_replicate", "dp_shard", "tp")


def rank_words(who: str, slow: Slow) -> str:
    """ "rank 3 on n7 (pp 0, tp 1) is slow: its own work takes 10.2% longer than ..., most of all backward ..." """
    peers = "the one rank that does the same" if slow.num_peers == 1 else f"{slow.num_peers} ranks that do the same"
    return (
        f"{who} is slow: its own work takes {slow.by:.1%} longer than that of {peers}, most of all {slow.kind} with "
        f"{_ms(slow.seconds)} a step, theirs {_ms(slow.usual_s)}"
    )


def link_words(between: str, slow: Slow) -> str:
    peers = "the one other link" if slow.num_peers == 1 else f"the {slow.num_peers} other links"
    return (
        f"the link between {between} is slow: a message there and back takes {_ms(slow.seconds)}, over {peers} that "
        f"carry the same {_ms(slow.usual_s)}"
    )


def who(rank: int, host: str, coordinate: Mapping[str, int]) -> str:
    """`coordinate` of the axes that are cut."""
    place = ", ".join(f"{axis} {coordinate[axis]}" for axis in _AXES if axis in coordinate)
    return f"rank {rank}" + (f" on {host}" if host else "") + (f" ({place})" if place else "")


def slow_rank(row: Mapping[str, Any]) -> str | None:
    """Of a row of metrics, the slowest of those that are named in it."""
    if (found := row.get("straggler_rank")) is None:
        return None
    others = len(row.get("straggler_ranks") or [found]) - 1
    text = who(found, str(row.get("straggler_host") or ""), row.get("straggler_coordinate") or {})
    text += f" and {others} more" if others else ""
    seen, usual = _ms(row["straggler_span_s"]), _ms(row["straggler_usual_s"])
    return f"{text}: {row['straggler_by']:+.1%}, most of all {row['straggler_span']}, {seen} beside {usual} a step"


def slow_link(row: Mapping[str, Any]) -> str | None:
    ends = row.get("straggler_link")
    if not ends:
        return None
    seen, usual = _ms(row["straggler_link_s"]), _ms(row["straggler_link_usual_s"])
    return f"ranks {ends[0]} and {ends[1]}: {seen} there and back, others {usual}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
