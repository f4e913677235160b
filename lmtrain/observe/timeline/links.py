"""Which spans belong together: a send and its receive, the members of a collective. numpy only.

Called by merge, which sets clocks by them, and by those who ask what a rank has waited for. Knows who takes part in
what from the layout, and no clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.layout import Layout
from lmtrain.observe.spans.format import Axis, Flag, Kind

Ints = NDArray[np.int64]
Spans = NDArray[Any]

# which of (pp, dp_replicate, dp_shard, tp) differ among the ranks of an axis
_VARIES = {
    Axis.PP: (1, 0, 0, 0), Axis.DP: (0, 1, 1, 0), Axis.DP_REPLICATE: (0, 1, 0, 0), Axis.DP_SHARD: (0, 0, 1, 0),
    Axis.TP: (0, 0, 0, 1), Axis.PLANE: (0, 1, 1, 1), Axis.WORLD: (1, 1, 1, 1),
}  # fmt: skip


def messages(spans: Spans) -> tuple[Ints, Ints]:
    """Places of the sends whose receive is there too, and of those receives, pair by pair."""
    kind, peer = spans["kind"], spans["peer"]
    sends = np.flatnonzero((kind == Kind.SEND) & (peer >= 0) & (spans["flags"] & Flag.EARLY == 0))
    receives = np.flatnonzero((kind == Kind.RECEIVE) & (peer >= 0))
    both = np.concatenate([sends, receives])
    rank, other = spans["rank"][both].astype(np.int64), peer[both].astype(np.int64)
    sent = np.arange(both.size) < sends.size
    key = _key(np.where(sent, rank, other), np.where(sent, other, rank), spans["step"][both], spans["number"][both])
    _, of_sends, of_receives = np.intersect1d(key[: sends.size], key[sends.size :], return_indices=True)
    return sends[of_sends], receives[of_receives]


def collectives(spans: Spans, layout: Layout) -> tuple[Ints, Ints]:
    """Places of the members' spans, those of a collective behind one another by rank; and which collective each is."""
    chosen = (spans["kind"] == Kind.COLLECTIVE) & (spans["axis"] != Axis.NONE) & (spans["flags"] & Flag.ASIDE == 0)
    places = np.flatnonzero(chosen)
    of = spans[places]
    rank, peer = of["rank"].astype(np.int64), of["peer"].astype(np.int64)
    group = np.where(peer >= 0, np.minimum(rank, peer), first_ranks(layout)[of["axis"], rank])
    partner = np.where(peer >= 0, np.maximum(rank, peer), -1) + 1
    key = _key(of["axis"], group, partner, of["step"], of["number"])
    order = np.lexsort((rank, key))
    return places[order], np.unique(key[order], return_inverse=True)[1].astype(np.int64)


def first_ranks(layout: Layout) -> Ints:
    """[axis, rank]: the lowest rank of the group that this rank belongs to along this axis."""
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    ranks = np.arange(layout.world_size).reshape(sizes)
    found = np.zeros((len(Axis), layout.world_size), np.int64)
    for axis, varies in _VARIES.items():
        lowest = ranks[tuple(slice(0, 1) if varying else slice(None) for varying in varies)]
        found[axis] = np.broadcast_to(lowest, sizes).ravel()
    return found


def _key(*parts: NDArray[Any]) -> Ints:
    """One number for each combination."""
    key = np.zeros(len(parts[0]), np.int64)
    for part in parts:
        values, which = np.unique(part, return_inverse=True)
        key = key * max(len(values), 1) + which  # because: after each part there are no more values than spans
        key = np.unique(key, return_inverse=True)[1].astype(np.int64)
    return key
