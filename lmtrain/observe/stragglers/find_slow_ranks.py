"""Straggler detection: from the times of all ranks per window, the ranks and links that are slow for a long time.

Called by train/straggler_watch on rank 0. Pure: no clock, no process. A rank is compared with the median of the other
ranks that do the same work, a link with that of the other links that carry the same messages. A straggler is slow in
several windows in a row, by more than chance explains: the median absolute deviation (MAD) of these peers' windows from
their own medians.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

WINDOWS_IN_A_ROW = 4  # windows
MIN_EXCESS = 0.05  # fraction of the peers' time; a smaller excess is not reported
MIN_EXCESS_S = 0.002  # seconds a step; because: a smaller excess can come from the operating system's scheduler
MIN_LINK_EXCESS, MIN_LINK_EXCESS_S = 0.5, 0.001  # fraction and seconds, for the round trip of a message
_CHANCE_FACTOR = 4.0  # factor by which an excess must exceed the chance deviation
_MAD = 1.4826  # converts a MAD to the standard deviation of a normal distribution
_NUM_WINDOWS = 32  # windows
_WINDOW_SIZES = (1, 4, 16)  # windows joined into one; because: the noisier the windows, the longer they must be
_AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Straggler:
    """A rank or link that is slower than its peers. `kind` is the kind of work with the largest excess: it takes
    `seconds` a step, and `usual_s` in the median of the peers.

    `by` is the excess of all its work, as a fraction.
    """

    kind: str
    by: float
    seconds: float
    usual_s: float
    num_peers: int


class PeerGroup:
    """Ranks or links that do the same work and are compared with each other.

    A member is slow if it takes longer than the others by the fraction `min_excess` and by `min_excess_s` seconds.
    """

    def __init__(self, members: Sequence[int], kinds: Sequence[str], min_excess: float, min_excess_s: float) -> None:
        self.members, self.kinds = tuple(members), tuple(kinds)
        self.stragglers: dict[int, Straggler] = {}
        self._scale_of: dict[int, _Scale] = {}
        self._scales = [_Scale(size, len(self.members), min_excess, min_excess_s) for size in _WINDOW_SIZES]

    def add(self, times: Sequence[Sequence[float]]) -> None:
        """Add the times measured over one window of steps, and update `stragglers`, the members (ranks or links) found
        slow. `times[m][k]` is the time of member m for kind of work k, in seconds a step; a row with a NaN stands for a
        member that was not measured.
        """
        if len(self.members) < 2:
            return
        for scale in self._scales:
            if not scale.add(times):
                continue
            for index in scale.slow_members():
                self._scale_of.setdefault(self.members[index], scale)
            for member in [straggler for straggler, owner in self._scale_of.items() if owner is scale]:
                index = self.members.index(member)
                if scale.has_recovered(index):
                    del self._scale_of[member], self.stragglers[member]
                else:
                    self.stragglers[member] = self._straggler(scale, index)

    def excess(self) -> list[float]:
        """Return each member's excess in the newest windows, as a fraction of the other members' time."""
        newest = [*self._scales[0].excess][-WINDOWS_IN_A_ROW:]
        return [median(column) for column in zip(*newest, strict=True)] or [0.0] * len(self.members)

    def _straggler(self, scale: _Scale, index: int) -> Straggler:
        newest = [*scale.times][-WINDOWS_IN_A_ROW:]
        own = [median(window[index][kind] for window in newest) for kind in range(len(self.kinds))]
        others = [
            median(row[kind] for window in newest for row_index, row in enumerate(window)
                   if row_index != index and math.isfinite(row[kind]))
            for kind in range(len(self.kinds))
        ]  # fmt: skip
        kind = max(range(len(self.kinds)), key=lambda kind: own[kind] - others[kind])
        excess = median(window[index] for window in [*scale.excess][-WINDOWS_IN_A_ROW:])
        return Straggler(self.kinds[kind], excess, own[kind], others[kind], len(self.members) - 1)


class _Scale:
    """Windows of one length: `size` incoming windows are joined into one.

    because: plain Python numbers, and only a count while no member is slow, cost a tenth of arrays for a few ranks
    """

    def __init__(self, size: int, num_members: int, min_excess: float, min_excess_s: float) -> None:
        self.size, self.min_excess, self.min_excess_s = size, min_excess, min_excess_s
        self._pending: list[Sequence[Sequence[float]]] = []
        self.times: deque[Sequence[Sequence[float]]] = deque(maxlen=WINDOWS_IN_A_ROW)
        self.excess: deque[list[float]] = deque(maxlen=_NUM_WINDOWS)  # over the others' median, as a fraction of it
        self._usual: deque[list[float]] = deque(maxlen=WINDOWS_IN_A_ROW)  # the others' median itself
        self._in_a_row = [0] * num_members  # windows with an excess above the minimum

    def add(self, times: Sequence[Sequence[float]]) -> bool:
        """Collect the times of one window of steps, `times[member][kind]` in seconds a step, and return False until
        there are `size` windows. Then join them by their medians, update by how much each member (rank or link) is
        slower than the others, and return True.
        """
        self._pending.append(times)
        if len(self._pending) < self.size:
            return False
        # because: one long step among many is chance
        window = times if self.size == 1 else [
            [median(values) for values in zip(*rows, strict=True)] for rows in zip(*self._pending, strict=True)
        ]  # fmt: skip
        self._pending = []
        totals = [sum(row) for row in window]
        excess = []
        self._usual.append(medians_of_others(totals))
        for index, (total, *usuals) in enumerate(zip(totals, *self._usual, strict=True)):
            excess_s = total - usuals[-1]
            # because: a fraction of the others' time in a single window would be as noisy as that window; a member
            # without data gets no excess
            fraction = excess_s / max(median(filter(math.isfinite, usuals)), 1e-9) if math.isfinite(excess_s) else 0.0
            excess.append(fraction)
            is_slow = fraction > self.min_excess and excess_s > self.min_excess_s
            self._in_a_row[index] = self._in_a_row[index] + 1 if is_slow else 0
        self.times.append(window)
        self.excess.append(excess)
        return True

    def slow_members(self) -> list[int]:
        """Return the indices of the members (ranks or links) that are slow: in each of the newest WINDOWS_IN_A_ROW
        windows they took longer than the others, by more than the minimum excess and by more than chance explains.
        """
        candidates = [index for index, windows in enumerate(self._in_a_row) if windows >= WINDOWS_IN_A_ROW]
        if not candidates:
            return []
        columns = [*zip(*self.excess, strict=True)]
        chance = _MAD * median(
            abs(value - middle) for column in columns for middle in [median(column)] for value in column
        )
        return [index for index in candidates if min(columns[index][-WINDOWS_IN_A_ROW:]) > _CHANCE_FACTOR * chance]

    def has_recovered(self, index: int) -> bool:
        """Return True if the slow member `index` has been less than half the minimum excess slower than the others in
        each of the newest windows.
        """
        return all(window[index] < self.min_excess / 2 for window in [*self.excess][-WINDOWS_IN_A_ROW:])


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of all other values, without NaN values. The result is NaN for a value that is
    NaN itself or that has no other value.
    """
    ordered = sorted((value, index) for index, value in enumerate(values) if math.isfinite(value))
    count, medians = len(ordered) - 1, [math.nan] * len(values)  # `count`: number of other values
    if count < 1:
        return medians
    low, high = (count - 1) // 2, count // 2
    for place, (_, index) in enumerate(ordered):
        medians[index] = (ordered[low + (place <= low)][0] + ordered[high + (place <= high)][0]) / 2
    return medians


def rank_message(label: str, straggler: Straggler) -> str:
    """Return a sentence about a slow rank: "rank 3 on n7 (pp 0, tp 1) is slow: its own work takes 10.2% longer ...".
    `label` names the rank.
    """
    others = "the one other rank" if straggler.num_peers == 1 else f"{straggler.num_peers} other ranks"
    return (
        f"{label} is slow: its own work takes {straggler.by:.1%} longer than that of {others} with this work, most of "
        f"all {straggler.kind} with {_format_ms(straggler.seconds)} a step beside {_format_ms(straggler.usual_s)}"
    )


def link_message(label: str, straggler: Straggler) -> str:
    """Return a sentence about a slow link between two ranks: "the link between rank 0 and rank 1 is slow: ...". `label`
    names the two ranks.
    """
    peers = "the one other link" if straggler.num_peers == 1 else f"the {straggler.num_peers} other links"
    return (
        f"the link between {label} is slow: a message there and back takes {_format_ms(straggler.seconds)}, over "
        f"{peers} that carry the same {_format_ms(straggler.usual_s)}"
    )


def rank_label(rank: int, host: str, coordinate: Mapping[str, int]) -> str:
    """Return "rank 3 on n7 (pp 0)"; `coordinate` holds the axes with a size above 1."""
    place = ", ".join(f"{axis} {coordinate[axis]}" for axis in _AXES if axis in coordinate)
    return f"rank {rank}" + (f" on {host}" if host else "") + (f" ({place})" if place else "")


def slow_rank_line(row: Mapping[str, Any]) -> str | None:
    """Return a line of text about the slowest straggler among the ranks, as the step row `row` of metrics.jsonl reports
    it; None if it reports none.
    """
    if (rank := row.get("straggler_rank")) is None:
        return None
    others = len(row.get("straggler_ranks") or [rank]) - 1
    text = rank_label(rank, str(row.get("straggler_host") or ""), row.get("straggler_coordinate") or {})
    text += f" and {others} more" if others else ""
    own, usual = _format_ms(row["straggler_span_s"]), _format_ms(row["straggler_usual_s"])
    return f"{text}: {row['straggler_by']:+.1%}, most of all {row['straggler_span']}, {own} beside {usual} a step"


def slow_link_line(row: Mapping[str, Any]) -> str | None:
    """Return a line of text about the slowest link between two ranks, as the step row `row` of metrics.jsonl reports
    it; None if it reports none.
    """
    ends = row.get("straggler_link")
    if not ends:
        return None
    own, usual = _format_ms(row["straggler_link_s"]), _format_ms(row["straggler_link_usual_s"])
    return f"ranks {ends[0]} and {ends[1]}: {own} there and back, others {usual}"


def _format_ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
