"""Where two runs' records part: the first step at which their data, loss or norm differ, and how far they come apart.

Called by `lmtrain runs diff`. Rows hold numbers in full, so equal means equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtrain.observe.history.record import Numbers, Record, Row

_DATA = ("samples_hash", "batch_digest")
_KEYS = ("samples", "tokens", "lr", "loss", "grad_norm", "skipped")
_AFTER = (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000)  # rows behind the first that differs


@dataclass(frozen=True)
class Parting:
    """Of two records; steps are those of which both have a row."""

    num_shared: int
    last_shared: int | None
    first: dict[str, int]  # by key, the first step at which the two differ
    equal_until: dict[str, int]  # by key, the last row before that, where there is one
    after: list[dict[str, Any]]  # how far the loss has come apart, some rows later each
    untold: list[str]  # keys that cannot be compared, in words

    @property
    def step(self) -> int | None:
        return min(self.first.values(), default=None)


def parting(a: Record, b: Record, same_shares: bool = True) -> Parting:
    """`same_shares` says that rank 0 of both is known to read the same part of a batch, so that its digest can be
    compared."""
    shared, left, right = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    first: dict[str, int] = {}
    until: dict[str, int] = {}
    untold = []
    for key in (*_DATA, *_KEYS):
        if key == "batch_digest" and not same_shares:
            untold.append("batch_digest: not at every start do the two cut a batch alike, or it is not known")
            continue
        differs = _differs(key, a, b, left, right)
        if differs is None:
            untold.append(f"{key}: not both runs have recorded it")
        elif differs.any():
            at = int(differs.argmax())
            first[key] = int(shared[at])
            if at:
                until[key] = int(shared[at - 1])
    last = int(shared[-1]) if shared.size else None
    return Parting(int(shared.size), last, first, until, _after(a, b, shared, left, right, first), untold)


def _differs(key: str, a: Record, b: Record, left: Any, right: Any) -> Any:
    if key in _DATA:
        ours, theirs = np.array(a.texts[key], object)[left], np.array(b.texts[key], object)[right]
        known = (ours != "") & (theirs != "")
        return (ours != theirs) & known if known.any() else None
    if key not in a.columns or key not in b.columns:
        return None
    ours, theirs = a.columns[key][left], b.columns[key][right]
    return (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))


def _after(a: Record, b: Record, shared: Numbers, left: Any, right: Any, first: dict[str, int]) -> list[dict[str, Any]]:
    if "loss" not in first:
        return []
    begin = int(np.searchsorted(shared, first["loss"]))
    ours, theirs = a.columns["loss"][left], b.columns["loss"][right]
    places = [begin + rows for rows in _AFTER if begin + rows < len(shared)]
    if places[-1] != len(shared) - 1:
        places.append(len(shared) - 1)
    return [
        {"step": int(shared[at]), "a": float(ours[at]), "b": float(theirs[at]), "apart": float(theirs[at] - ours[at])}
        for at in places
    ]


def starts_that_count(record: Record) -> list[Row]:
    """Those of which steps are left, rising by step: what an earlier start did beyond a later one is gone."""
    kept: list[Row] = []
    for row in record.rows.get("start", []):
        kept = [*(one for one in kept if one["step"] < row["step"]), row]
    return kept


def together(starts: Sequence[Sequence[Row]], end: int | None) -> Iterator[tuple[int, list[Row]]]:
    """Of two runs, from each start of either on: what both ran with, up to the step `end`."""
    for step in sorted({row["step"] for rows in starts for row in rows}):
        pair = [row for rows in starts for row in [one for one in rows if one["step"] <= step][-1:]]
        if len(pair) == len(starts) and (end is None or step < end):
            yield step, pair
