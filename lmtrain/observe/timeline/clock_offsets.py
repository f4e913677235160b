"""Estimation of the offsets and drifts between ranks' clocks, from the times of their exchanges. numpy only.

Called by merge_ranks.py with the evidence of one window of time. There are two kinds of evidence: an event on one rank
that began before an event on another ended (a message is sent before it arrives), and events that ended on two ranks at
about the same moment (a collective). The first kind bounds the difference of two clocks from one side, and messages
both ways bound it from both sides; the distance of the bounds gives the weight of the pair. All pairs are solved
together by weighted least squares, with outliers weighed down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDS = 8
_BINS = 4  # bins of time per window; a pair of ranks has a row in each: two bins show a drift, four also show outliers
_FINEST_NS = 20e3  # because: waking up a process takes so long, and no pair is more exact
_DRIFT = 200e-6  # because: a quartz clock is off by at most 100 ppm, so two clocks drift apart by at most twice that
_MARGIN_NS = 5e3  # the least time between the sending of a message and its arrival
_MAX_DOUBT = 3.0  # sigmas beyond which a row's weight falls with its distance


@dataclass(frozen=True)
class Pairs:
    """Pairs of moments on two ranks' clocks, in ns of a first guess of the common clock."""

    a: Ints
    a_ns: Floats
    b: Ints
    b_ns: Floats


@dataclass(frozen=True)
class Clocks:
    """The correction of each rank's first guess: offset_ns + rate * (time - middle_ns) is added."""

    middle_ns: float
    offset_ns: Floats
    rate: Floats
    linked: NDArray[np.bool_]  # True if a chain of evidence links the rank to the first rank
    doubt_ns: Floats  # mean deviation of the rows that determine a rank's clock

    def correct(self, rank: int | Ints, times_ns: Floats) -> Floats:
        """Convert times by a rank's first guess of the common clock to corrected times; `rank` may be one per time."""
        return times_ns + self.offset_ns[rank] + self.rate[rank] * (times_ns - self.middle_ns)


@dataclass
class _Rows:
    """Equations of the fit: b's clock minus a's should move by `move_ns` at this moment, give or take `sigma_ns`."""

    a: Ints
    b: Ints
    at_ns: Floats
    move_ns: Floats
    sigma_ns: Floats


def fit_clocks(num_ranks: int, before: Pairs, together: Pairs) -> Clocks:
    """Return the estimated offset and drift of each rank's clock against the first rank's. They are fitted to pairs of
    events, one on a rank a and one on a rank b: in `before` the event on a happened before the one on b, in `together`
    both ended at about the same time.
    """
    anchors, linked = _linked_sets(num_ranks, before, together)
    clocks = Clocks(0.0, np.zeros(num_ranks), np.zeros(num_ranks), linked, np.zeros(num_ranks))
    for round_ in range(_ROUNDS if before.a.size + together.a.size else 0):
        before_ns = [clocks.correct(before.a, before.a_ns), clocks.correct(before.b, before.b_ns)]
        together_ns = [clocks.correct(together.a, together.a_ns), clocks.correct(together.b, together.b_ns)]
        all_ns = np.concatenate([*before_ns, *together_ns])
        middle, reach = (all_ns.min() + all_ns.max()) / 2, max((all_ns.max() - all_ns.min()) / 2, 1.0)
        # because: clocks that are seconds apart put the two ends of a pair into different bins of a short window
        bins = _BINS if round_ > 1 else 1
        bins_of = [_time_bins(times[0], middle, reach, bins) for times in (before_ns, together_ns)]
        rows = [
            *_rows_from_bounds(before, num_ranks, before_ns[0], before_ns[1], bins_of[0]),
            _rows_from_ends(together, num_ranks, together_ns[0], together_ns[1], bins_of[1]),
        ]
        joined = _Rows(*(np.concatenate([getattr(part, name) for part in rows]) for name in _Rows.__dataclass_fields__))
        clocks = _refit(_recentered(clocks, middle), joined, anchors, reach)
    return clocks


def _time_bins(times_ns: Floats, middle: float, reach: float, num_bins: int) -> Ints:
    """Return the bin of each time, of `num_bins` equal bins from `middle` - `reach` to `middle` + `reach`."""
    bins: Ints = np.clip((times_ns - middle + reach) / (2 * reach) * num_bins, 0, num_bins - 1).astype(np.int64)
    return bins


def _recentered(clocks: Clocks, middle_ns: float) -> Clocks:
    """Return `clocks` written with the reference time `middle_ns`: each correction, offset + rate * (time - reference
    time), keeps its values.
    """
    return replace(
        clocks, middle_ns=middle_ns, offset_ns=clocks.offset_ns + clocks.rate * (middle_ns - clocks.middle_ns)
    )


def _linked_sets(num_ranks: int, *evidence: Pairs) -> tuple[Ints, NDArray[np.bool_]]:
    """Group the ranks that pairs of events link, directly or through other ranks. Return the lowest rank of each group,
    and a mask of the ranks in rank 0's group. `evidence` has one or more sets of pairs.
    """
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


def _rows_from_ends(pairs: Pairs, num_ranks: int, a_ns: Floats, b_ns: Floats, bins: Ints) -> _Rows:
    """Return equations for the fit of the clocks, from events that ended on ranks a and b at about the same time: one
    equation per pair of ranks and time bin, from the median of `b_ns` - `a_ns`. `a_ns`, `b_ns` and `bins` are the two
    times and the time bin of each pair of events.
    """
    key = (pairs.a * num_ranks + pairs.b) * _BINS + bins
    gap = b_ns - a_ns
    order = np.lexsort((gap, key))
    keys, first, count = np.unique(key[order], return_index=True, return_counts=True)
    sorted_ns = gap[order]
    middle = (sorted_ns[first + (count - 1) // 2] + sorted_ns[first + count // 2]) / 2
    spread = sorted_ns[first + 3 * (count - 1) // 4] - sorted_ns[first + (count - 1) // 4]
    # because: the spread of a few samples says little, so each is taken to be uncertain by ten times the finest
    sigma = np.hypot(_FINEST_NS, np.maximum(spread, 10 * _FINEST_NS) / np.sqrt(count))
    at = np.bincount(np.searchsorted(keys, key), weights=a_ns, minlength=len(keys)) / count
    pair = keys // _BINS
    return _Rows(pair // num_ranks, pair % num_ranks, at, -middle, sigma)


def _rows_from_bounds(pairs: Pairs, num_ranks: int, a_ns: Floats, b_ns: Floats, bins: Ints) -> list[_Rows]:
    """Return two sets of equations for the fit of the clocks, from events of which the one on rank a, at `a_ns`,
    happened before the one on rank b, at `b_ns`. The first set is for pairs of ranks with such events in both
    directions, the second for events whose order the present clocks contradict. `bins` is the time bin of each pair of
    events.
    """
    up = pairs.a < pairs.b
    pair = np.where(up, pairs.a * num_ranks + pairs.b, pairs.b * num_ranks + pairs.a)
    key = (pair * _BINS + bins) * 2 + up
    gap = b_ns - a_ns
    order = np.lexsort((gap, key))
    keys, first = np.unique(key[order], return_index=True)
    gap, at = gap[order][first], a_ns[order][first]
    pair, up = keys // 2 // _BINS, keys % 2 == 1
    low_rank, high_rank = pair // num_ranks, pair % num_ranks

    two_sided = np.flatnonzero(keys[1:] // 2 == keys[:-1] // 2)  # down (0) comes before up (1)
    down_gap, up_gap = gap[two_sided], gap[two_sided + 1]
    violated = np.flatnonzero(gap < _MARGIN_NS)
    return [
        _Rows(
            low_rank[two_sided], high_rank[two_sided], (at[two_sided] + at[two_sided + 1]) / 2, (down_gap - up_gap) / 2,
            np.hypot(_FINEST_NS, np.abs(down_gap + up_gap) / 3),
        ),
        _Rows(
            low_rank[violated], high_rank[violated], at[violated],
            np.where(up[violated], 1.0, -1.0) * (_MARGIN_NS - gap[violated]),
            np.full(violated.size, _FINEST_NS / 4),
        ),
    ]  # fmt: skip


def _refit(clocks: Clocks, rows: _Rows, anchors: Ints, reach: float) -> Clocks:
    """Return `clocks`, corrected by a robust least-squares fit of the equations `rows`. The clocks of the ranks
    `anchors` are kept; `reach` is half the length of the time window in ns.

    The unknowns are each rank's offset, and its drift over half the window.
    """
    num = len(clocks.offset_ns)
    u = (rows.at_ns - clocks.middle_ns) / reach
    weight: Floats = 1 / rows.sigma_ns**2
    prior = 1 / max(_DRIFT * reach, 1.0) ** 2
    tilt = clocks.rate * reach  # drift of the previous round
    for _ in range(4):
        normal, right = np.zeros((2 * num, 2 * num)), np.zeros(2 * num)
        columns = (rows.a, rows.b, rows.a + num, rows.b + num)
        factors = (-np.ones_like(u), np.ones_like(u), -u, u)
        for row_index, factor in zip(columns, factors, strict=True):
            np.add.at(right, row_index, weight * factor * rows.move_ns)
            for column_index, other_factor in zip(columns, factors, strict=True):
                np.add.at(normal, (row_index, column_index), weight * factor * other_factor)
        diagonal = np.arange(num, 2 * num)
        normal[diagonal, diagonal] += prior
        right[num:] -= prior * tilt  # because: the total drift is likely to be small, not the change in this round
        large = max(float(normal.max()), 1.0)
        normal[anchors, anchors] += large
        normal[anchors + num, anchors + num] += large
        unlinked = np.flatnonzero(normal[np.arange(num), np.arange(num)] == 0)
        normal[unlinked, unlinked] = large
        solution = _solve(normal, right)
        deviation = np.abs(_predicted_moves(solution, rows, u, num) - rows.move_ns) / rows.sigma_ns
        weight[:] = np.minimum(1.0, _MAX_DOUBT / np.maximum(deviation, _MAX_DOUBT)) / rows.sigma_ns**2
    residual = np.abs(_predicted_moves(solution, rows, u, num) - rows.move_ns)
    doubt = np.zeros(num)
    for side in (rows.a, rows.b):
        total = np.bincount(side, weights=weight * residual, minlength=num)
        doubt += total / np.maximum(np.bincount(side, weights=weight, minlength=num), 1e-30) / 2
    offset, rate = solution[:num], solution[num:] / reach
    return replace(
        clocks, doubt_ns=doubt, rate=clocks.rate + rate + clocks.rate * rate,
        offset_ns=clocks.offset_ns + offset + rate * clocks.offset_ns,
    )  # fmt: skip


def _solve(normal: Floats, right: Floats) -> Floats:
    """Solve the linear equations `normal` @ x = `right` for x; by least squares if the matrix is singular."""
    try:
        solution = np.linalg.solve(normal, right)
    except np.linalg.LinAlgError:  # because: a damaged moment, months away, leaves the drifts undetermined
        solution = np.linalg.lstsq(normal, right)[0]
    return np.asarray(solution, dtype=np.float64)


def _predicted_moves(solution: Floats, rows: _Rows, u: Floats, num_ranks: int) -> Floats:
    """Return by how much the solution moves b's clock against a's in each row; `u` is the row's scaled time."""
    return solution[rows.b] - solution[rows.a] + (solution[rows.b + num_ranks] - solution[rows.a + num_ranks]) * u
