"""How far apart the ranks' clocks are, and how fast they drift, from what they have exchanged. numpy only.

Called by merge with evidence of one window of time. Two kinds: what began on one rank before something ended on another
(a message is sent before it arrives), and what ended on two ranks at about the same moment (a collective). The first
kind bounds a difference of clocks from one side, and messages both ways from both sides; how close the bounds are says
how much a pair is worth. All pairs are solved together by weighted least squares, with outliers weighed down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDS = 8
_BINS = 4  # of time, in each of which a pair of ranks has a row of its own: two show a drift, four also outliers
_FINEST_NS = 20e3  # because: no pair is worth more than a process needs to wake up
_DRIFT = 200e-6  # because: quartz is off by 100 millionths at most, so that two differ by twice that
_MARGIN_NS = 5e3  # by which a message arrives after it was sent, at least
_DOUBT_MOST = 3.0  # sigmas, from where a row counts less the further off it is


@dataclass(frozen=True)
class Pairs:
    """Moments on two ranks' clocks, in ns of a first guess at a common one."""

    a: Ints
    a_ns: Floats
    b: Ints
    b_ns: Floats


@dataclass(frozen=True)
class Clocks:
    """What is added to each rank's first guess: offset_ns + rate * (time - middle_ns)."""

    middle_ns: float
    offset_ns: Floats
    rate: Floats
    linked: NDArray[np.bool_]  # to the first rank, by any chain of evidence
    doubt_ns: Floats  # how far apart the rows are that place a rank

    def correct(self, rank: int | Ints, times_ns: Floats) -> Floats:
        return times_ns + self.offset_ns[rank] + self.rate[rank] * (times_ns - self.middle_ns)


@dataclass
class _Rows:
    """b's clock less a's is to be moved by so much, at this moment, give or take sigma."""

    a: Ints
    b: Ints
    at_ns: Floats
    move_ns: Floats
    sigma_ns: Floats


def solve(num_ranks: int, before: Pairs, together: Pairs) -> Clocks:
    """`before`: a's moment was before b's. `together`: the two were about the same. The first rank's clock is kept."""
    anchors, linked = _islands(num_ranks, before, together)
    found = Clocks(0.0, np.zeros(num_ranks), np.zeros(num_ranks), linked, np.zeros(num_ranks))
    for round_ in range(_ROUNDS if before.a.size + together.a.size else 0):
        one = [found.correct(before.a, before.a_ns), found.correct(before.b, before.b_ns)]
        other = [found.correct(together.a, together.a_ns), found.correct(together.b, together.b_ns)]
        whole = np.concatenate([*one, *other])
        middle, reach = (whole.min() + whole.max()) / 2, max((whole.max() - whole.min()) / 2, 1.0)
        # because: clocks that are seconds apart do not share a bin of a window of a second
        bins = _BINS if round_ > 1 else 1
        when = [_bins(times[0], middle, reach, bins) for times in (one, other)]
        rows = [
            *_from_bounds(before, num_ranks, one[0], one[1], when[0]),
            _from_ends(together, num_ranks, other[0], other[1], when[1]),
        ]
        joined = _Rows(*(np.concatenate([getattr(part, name) for part in rows]) for name in _Rows.__dataclass_fields__))
        found = _moved(_about(found, middle), joined, anchors, reach)
    return found


def _bins(times_ns: Floats, middle: float, reach: float, num: int) -> Ints:
    found: Ints = np.clip((times_ns - middle + reach) / (2 * reach) * num, 0, num - 1).astype(np.int64)
    return found


def _about(clocks: Clocks, middle_ns: float) -> Clocks:
    """The same, said from another moment."""
    return replace(
        clocks, middle_ns=middle_ns, offset_ns=clocks.offset_ns + clocks.rate * (middle_ns - clocks.middle_ns)
    )


def _islands(num_ranks: int, *evidence: Pairs) -> tuple[Ints, NDArray[np.bool_]]:
    """The lowest rank of each set of ranks that evidence joins, and who is in the first one's."""
    lowest = np.arange(num_ranks)
    joined = np.unique(np.concatenate([np.stack([p.a, p.b]) for p in evidence], axis=1), axis=1)
    for _ in range(num_ranks):
        new = lowest.copy()
        np.minimum.at(new, joined[0], lowest[joined[1]])
        np.minimum.at(new, joined[1], lowest[joined[0]])
        if (new == lowest).all():
            break
        lowest = new
    return np.unique(lowest), lowest == 0


def _from_ends(pairs: Pairs, num: int, a_ns: Floats, b_ns: Floats, bins: Ints) -> _Rows:
    """A row for each pair of ranks and bin: the median of how far apart they ended."""
    key = (pairs.a * num + pairs.b) * _BINS + bins
    apart = b_ns - a_ns
    order = np.lexsort((apart, key))
    keys, first, count = np.unique(key[order], return_index=True, return_counts=True)
    sorted_ns = apart[order]
    middle = (sorted_ns[first + (count - 1) // 2] + sorted_ns[first + count // 2]) / 2
    spread = sorted_ns[first + 3 * (count - 1) // 4] - sorted_ns[first + (count - 1) // 4]
    # because: of a few samples the spread says little, so each is taken to be uncertain by ten times the finest
    sigma = np.hypot(_FINEST_NS, np.maximum(spread, 10 * _FINEST_NS) / np.sqrt(count))
    at = np.bincount(np.searchsorted(keys, key), weights=a_ns, minlength=len(keys)) / count
    pair = keys // _BINS
    return _Rows(pair // num, pair % num, at, -middle, sigma)


def _from_bounds(pairs: Pairs, num: int, a_ns: Floats, b_ns: Floats, bins: Ints) -> list[_Rows]:
    """Where a pair of ranks has bounds both ways in a bin: their middle. And what a broken bound asks for."""
    up = pairs.a < pairs.b
    pair = np.where(up, pairs.a * num + pairs.b, pairs.b * num + pairs.a)
    key = (pair * _BINS + bins) * 2 + up
    gap = b_ns - a_ns
    order = np.lexsort((gap, key))
    keys, first = np.unique(key[order], return_index=True)
    gap, at = gap[order][first], a_ns[order][first]
    pair, up = keys // 2 // _BINS, keys % 2 == 1
    low_rank, high_rank = pair // num, pair % num

    both = np.flatnonzero(keys[1:] // 2 == keys[:-1] // 2)  # down (0) lies before up (1)
    down_gap, up_gap = gap[both], gap[both + 1]
    off = np.flatnonzero(gap < _MARGIN_NS)
    return [
        _Rows(
            low_rank[both], high_rank[both], (at[both] + at[both + 1]) / 2, (down_gap - up_gap) / 2,
            np.hypot(_FINEST_NS, np.abs(down_gap + up_gap) / 3),
        ),
        _Rows(
            low_rank[off], high_rank[off], at[off], np.where(up[off], 1.0, -1.0) * (_MARGIN_NS - gap[off]),
            np.full(off.size, _FINEST_NS / 4),
        ),
    ]  # fmt: skip


def _moved(clocks: Clocks, rows: _Rows, anchors: Ints, reach: float) -> Clocks:
    """After all rows have been heard. Unknown are each rank's offset, and its drift over half the window."""
    num = len(clocks.offset_ns)
    u = (rows.at_ns - clocks.middle_ns) / reach
    weight: Floats = 1 / rows.sigma_ns**2
    solution: Floats = np.zeros(2 * num)
    prior = 1 / max(_DRIFT * reach, 1.0) ** 2
    tilt = clocks.rate * reach  # of before
    for _ in range(4):
        normal, right = np.zeros((2 * num, 2 * num)), np.zeros(2 * num)
        columns = (rows.a, rows.b, rows.a + num, rows.b + num)
        factors = (-np.ones_like(u), np.ones_like(u), -u, u)
        for one, by in zip(columns, factors, strict=True):
            np.add.at(right, one, weight * by * rows.move_ns)
            for other, also in zip(columns, factors, strict=True):
                np.add.at(normal, (one, other), weight * by * also)
        diagonal = np.arange(num, 2 * num)
        normal[diagonal, diagonal] += prior
        right[num:] -= prior * tilt  # because: the drift as a whole is likely to be small, not what is added to it
        heavy = max(float(normal.max()), 1.0)
        normal[anchors, anchors] += heavy
        normal[anchors + num, anchors + num] += heavy
        lonely = np.flatnonzero(normal[np.arange(num), np.arange(num)] == 0)
        normal[lonely, lonely] = heavy
        solution = _solved(normal, right)
        off = np.abs(_at(solution, rows, u, num) - rows.move_ns) / rows.sigma_ns
        weight[:] = np.minimum(1.0, _DOUBT_MOST / np.maximum(off, _DOUBT_MOST)) / rows.sigma_ns**2
    left = np.abs(_at(solution, rows, u, num) - rows.move_ns)
    doubt = np.zeros(num)
    for side in (rows.a, rows.b):
        total = np.bincount(side, weights=weight * left, minlength=num)
        doubt += total / np.maximum(np.bincount(side, weights=weight, minlength=num), 1e-30) / 2
    offset, rate = solution[:num], solution[num:] / reach
    return replace(
        clocks, doubt_ns=doubt, rate=clocks.rate + rate + clocks.rate * rate,
        offset_ns=clocks.offset_ns + offset + rate * clocks.offset_ns,
    )  # fmt: skip


def _solved(normal: Floats, right: Floats) -> Floats:
    try:
        found = np.linalg.solve(normal, right)
    except np.linalg.LinAlgError:  # because: of a moment that damage has put months away, drifts can be anything
        found = np.linalg.lstsq(normal, right)[0]
    return np.asarray(found, dtype=np.float64)


def _at(solution: Floats, rows: _Rows, u: Floats, num: int) -> Floats:
    return solution[rows.b] - solution[rows.a] + (solution[rows.b + num] - solution[rows.a + num]) * u
