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
from time import monotonic_ns
from typing import Any

_WAITED_NS = 100_000  # because: a shorter wait is the cost of taking a message that has already arrived
IN_A_ROW = 4  # windows
LEAST = 0.05  # fraction of the peers' time; a smaller excess is not reported
LEAST_S = 0.002  # seconds a step; because: a smaller excess can come from the operating system's scheduler
LINK_LEAST, LINK_LEAST_S = 0.5, 0.001  # fraction and seconds, for the round trip of a message
_CHANCES = 4.0  # factor by which an excess must exceed the chance deviation
_MAD = 1.4826  # converts a MAD to the standard deviation of a normal distribution
_KEPT = 32  # windows
_MERGED = (1, 4, 16)  # windows joined into one; because: the noisier the windows, the longer they must be
_AXES = ("pp", "dp_replicate", "dp_shard", "tp")


class Links:
    def __init__(self) -> None:
        self.open = False  # True inside a step
        self._sent: dict[int, tuple[int, int]] = {}  # by peer: sum of times in ns, and their number
        self._came: dict[int, tuple[int, int]] = {}

    def sent(self, peer: int) -> None:
        """Add the time at which this step's first message to that rank is sent."""
        if self.open:
            total, count = self._sent.get(peer, (0, 0))
            self._sent[peer] = total + monotonic_ns(), count + 1

    def came(self, peer: int, since_ns: int) -> None:
        """Add the arrival time of this step's first message from that rank.

        A wait since `since_ns` that is shorter than _WAITED_NS is not counted.
        """
        now = monotonic_ns()
        if self.open and now - since_ns > _WAITED_NS:
            total, count = self._came.get(peer, (0, 0))
            self._came[peer] = total + now, count + 1

    def take(self, peer: int, steps: int) -> tuple[int, int]:
        """Return the peer's (send, arrival) times in ns, summed over `steps` steps; 0 unless seen in each step."""
        (sent, num_sent), (came, num_came) = self._sent.pop(peer, (0, 0)), self._came.pop(peer, (0, 0))
        return sent if num_sent == steps else 0, came if num_came == steps else 0

    def clear(self) -> None:
        self._sent, self._came = {}, {}


links = Links()


@dataclass(frozen=True)
class Slow:
    """A straggler: the kind of work with the largest excess takes `seconds` a step, the peers' median is `usual_s`.

    `by` is the excess of all its work, as a fraction.
    """

    kind: str
    by: float
    seconds: float
    usual_s: float
    num_peers: int


class Watched:
    """Ranks, or links, that are compared with each other. `least` is a fraction, `least_s` a difference in seconds."""

    def __init__(self, members: Sequence[int], kinds: Sequence[str], least: float, least_s: float) -> None:
        self.members, self.kinds = tuple(members), tuple(kinds)
        self.slow: dict[int, Slow] = {}
        self._named_by: dict[int, _Scale] = {}
        self._scales = [_Scale(merged, len(self.members), least, least_s) for merged in _MERGED]

    def add(self, times: Sequence[Sequence[float]]) -> None:
        """Add a window: [members, kinds] in seconds a step. A row with NaN says nothing about its member."""
        if len(self.members) < 2:
            return
        for scale in self._scales:
            if not scale.add(times):
                continue
            for at in scale.slow():
                self._named_by.setdefault(self.members[at], scale)
            for member in [one for one, by in self._named_by.items() if by is scale]:
                at = self.members.index(member)
                if scale.is_over(at):
                    del self._named_by[member], self.slow[member]
                else:
                    self.slow[member] = self._slow(scale, at)

    def excess(self) -> list[float]:
        """Return each member's excess in the newest windows, as a fraction of the other members' time."""
        newest = [*self._scales[0].excess][-IN_A_ROW:]
        return [median(column) for column in zip(*newest, strict=True)] or [0.0] * len(self.members)

    def _slow(self, scale: _Scale, at: int) -> Slow:
        newest = [*scale.times][-IN_A_ROW:]
        seen = [median(window[at][kind] for window in newest) for kind in range(len(self.kinds))]
        usual = [
            median(row[kind] for window in newest for other, row in enumerate(window)
                   if other != at and math.isfinite(row[kind]))
            for kind in range(len(self.kinds))
        ]  # fmt: skip
        kind = max(range(len(self.kinds)), key=lambda kind: seen[kind] - usual[kind])
        by = median(window[at] for window in [*scale.excess][-IN_A_ROW:])
        return Slow(self.kinds[kind], by, seen[kind], usual[kind], len(self.members) - 1)


class _Scale:
    """Windows of one length: `merged` incoming windows are joined into one.

    because: plain Python numbers, and only a count while no member is slow, cost a tenth of arrays for a few ranks
    """

    def __init__(self, merged: int, num_members: int, least: float, least_s: float) -> None:
        self.merged, self.least, self.least_s = merged, least, least_s
        self._coming: list[Sequence[Sequence[float]]] = []
        self.times: deque[Sequence[Sequence[float]]] = deque(maxlen=IN_A_ROW)
        self.excess: deque[list[float]] = deque(maxlen=_KEPT)  # over the others' median, as a fraction of it
        self._usual: deque[list[float]] = deque(maxlen=IN_A_ROW)  # the others' median itself
        self._in_a_row = [0] * num_members  # windows with an excess above the least

    def add(self, times: Sequence[Sequence[float]]) -> bool:
        """Add a window, and return True if it completes a joined window."""
        self._coming.append(times)
        if len(self._coming) < self.merged:
            return False
        # because: one long step among many is chance
        window = times if self.merged == 1 else [
            [median(values) for values in zip(*rows, strict=True)] for rows in zip(*self._coming, strict=True)
        ]  # fmt: skip
        self._coming = []
        totals = [sum(row) for row in window]
        excess = []
        self._usual.append(medians_of_others(totals))
        for at, (total, *usuals) in enumerate(zip(totals, *self._usual, strict=True)):
            over = total - usuals[-1]
            # because: a fraction of the others' time in a single window would be as noisy as that window; a member
            # without data gets no excess
            share = over / max(median(filter(math.isfinite, usuals)), 1e-9) if math.isfinite(over) else 0.0
            excess.append(share)
            self._in_a_row[at] = self._in_a_row[at] + 1 if share > self.least and over > self.least_s else 0
        self.times.append(window)
        self.excess.append(excess)
        return True

    def slow(self) -> list[int]:
        """Return the indices of the members that were too slow in each of the newest windows."""
        found = [at for at, windows in enumerate(self._in_a_row) if windows >= IN_A_ROW]
        if not found:
            return []
        columns = [*zip(*self.excess, strict=True)]
        chance = _MAD * median(abs(one - middle) for column in columns for middle in [median(column)] for one in column)
        return [at for at in found if min(columns[at][-IN_A_ROW:]) > _CHANCES * chance]

    def is_over(self, at: int) -> bool:
        """Return True if a slow member has kept pace in each of the newest windows."""
        return all(window[at] < self.least / 2 for window in [*self.excess][-IN_A_ROW:])


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of all other values, ignoring NaN; NaN if there are none."""
    known = sorted((value, at) for at, value in enumerate(values) if math.isfinite(value))
    count, found = len(known) - 1, [math.nan] * len(values)  # `count`: number of other values
    if count < 1:
        return found
    low, high = (count - 1) // 2, count // 2
    for place, (_, at) in enumerate(known):
        found[at] = (known[low + (place <= low)][0] + known[high + (place <= high)][0]) / 2
    return found


def rank_words(who: str, slow: Slow) -> str:
    """Return "rank 3 on n7 (pp 0, tp 1) is slow: its own work takes 10.2% longer ..."."""
    others = "the one other rank" if slow.num_peers == 1 else f"{slow.num_peers} other ranks"
    return (
        f"{who} is slow: its own work takes {slow.by:.1%} longer than that of {others} with this work, most of all "
        f"{slow.kind} with {_ms(slow.seconds)} a step beside {_ms(slow.usual_s)}"
    )


def link_words(between: str, slow: Slow) -> str:
    peers = "the one other link" if slow.num_peers == 1 else f"the {slow.num_peers} other links"
    return (
        f"the link between {between} is slow: a message there and back takes {_ms(slow.seconds)}, over {peers} that "
        f"carry the same {_ms(slow.usual_s)}"
    )


def who(rank: int, host: str, coordinate: Mapping[str, int]) -> str:
    """Return "rank 3 on n7 (pp 0)"; `coordinate` holds the axes with a size above 1."""
    place = ", ".join(f"{axis} {coordinate[axis]}" for axis in _AXES if axis in coordinate)
    return f"rank {rank}" + (f" on {host}" if host else "") + (f" ({place})" if place else "")


def slow_rank(row: Mapping[str, Any]) -> str | None:
    """Return a line about the slowest straggler in a row of metrics, or None if the row has none."""
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
