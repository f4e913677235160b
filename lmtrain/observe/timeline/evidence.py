"""What the ranks' spans say of their clocks: pairs of moments of which one was first, or which were the same.

Called by merge. A message is sent before it has arrived. Of a collective nobody ends before the last has begun, and
those who have waited for it end together; one that was started early and is waited for later says only the latter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.observe.spans.format import Flag
from lmtrain.observe.timeline.clocks import Pairs

_WAITED_NS = 20_000  # because: who comes after the end is through at once, and says nothing of when the end was
_LONGEST_NS = 3600e9  # because: a span of more than an hour is a damaged one, or of a rank that stood still
_MOST_COLLECTIVES = 20_000  # of a window; more say nothing new, and take memory

Ints = NDArray[np.int64]


def evidence(
    spans: NDArray[Any], index: Ints, origin: int, sent: tuple[Ints, Ints], joint: tuple[Ints, Ints]
) -> tuple[Pairs, Pairs]:
    """(before, together). `index` numbers each span's rank; `sent` are places of sends and their receives, `joint`
    places of members and which collective each is in, members behind one another."""
    begin, end = (spans[name] - origin for name in ("begin_ns", "end_ns"))
    short = (end >= begin) & (end - begin <= _LONGEST_NS)
    sent = tuple(places[short[sent[0]] & short[sent[1]]] for places in sent)
    joint = tuple(places[short[joint[0]]] for places in joint)
    befores, togethers = [(*sent, begin[sent[0]], end[sent[1]])], []
    place, which = _thinned(*joint)
    waited = end[place] - begin[place] >= _WAITED_NS
    punctual = spans["flags"][place] & Flag.EARLY == 0
    stride, largest = 1, int(np.bincount(which).max()) if which.size else 0
    while stride < largest:  # because: with powers of two few pairs are few steps from each rank to each other one
        one, other = np.flatnonzero(which[:-stride] == which[stride:]) + np.array([[0], [stride]])
        both = waited[one] & waited[other]
        a, b = place[one[both]], place[other[both]]
        togethers.append((a, b, end[a], end[b]))
        for early, late in ((one, other), (other, one)):
            a, b = place[early[punctual[early]]], place[late[punctual[early]]]
            befores.append((a, b, begin[a], end[b]))
        stride *= 2
    return _pairs(index, befores), _pairs(index, togethers)


def _pairs(index: Ints, found: list[tuple[Ints, Ints, Ints, Ints]]) -> Pairs:
    if not found:
        none, never = np.zeros(0, np.int64), np.zeros(0)
        return Pairs(none, never, none, never)
    a, b, a_ns, b_ns = (np.concatenate(part) for part in zip(*found, strict=True))
    return Pairs(index[a], a_ns.astype(np.float64), index[b], b_ns.astype(np.float64))


def _thinned(place: Ints, which: Ints) -> tuple[Ints, Ints]:
    numbers = np.unique(which)
    if numbers.size <= _MOST_COLLECTIVES:
        return place, which
    keep = np.isin(which, numbers[:: -(-numbers.size // _MOST_COLLECTIVES)])
    return place[keep], which[keep]
