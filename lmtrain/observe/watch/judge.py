"""The watchdog's decision: from a table of all ranks' positions, a verdict that names the ranks to blame for a hang.

Called by the hub a few times a second. The hub sends the verdict to guard.py, where rank 0 raises and prints it as a
PeerLostError; if rank 0 cannot, its companion prints it. Pure: no clock, no socket, no file. Imports little, because
each rank's companion has to start in milliseconds.
"""

from __future__ import annotations

FLOOR_S = 30.0  # because: a disk, a network or a busy machine sometimes stands still for some seconds
FACTOR = 10.0  # times the longest time seen
SILENT_S = 30.0  # because: on a busy machine a companion may not be scheduled for seconds
RUNNING, STOPPED, LOST, FAILED, DONE = "running", "stopped", "lost", "failed", "done"
LOST_KIND, FAILED_KIND, HANG_KIND = "lost", "failed", "hang"
_COLLECTIVE, _LEFT_OUT = "collective", "left out a collective"
_STRAYED = "came through other collectives in this step than those that did the same in the last"


class RankRow:
    """The state of a rank: its position in the program, and for how long it has been there."""

    def __init__(
        self, rank: int, host: str = "", phase: str = "build", step: int = -1, microbatch: int = -1, stage: int = -1,
        what: str = "", stood_s: float = 0.0, state: str = RUNNING, count: int = 0,
        odd: tuple[int, str, str] | None = None, said: str = "", code: int = 0, silent_s: float = 0.0,
        cpu_s: float = 0.0, asks: bool = False, way: tuple[int, int, dict[int, int]] | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.host, self.phase, self.step = rank, host, phase, step
        self.microbatch, self.stage, self.what, self.stood_s = microbatch, stage, what, stood_s
        self.state, self.count, self.odd, self.said, self.code = state, count, odd, said, code
        self.silent_s, self.cpu_s = silent_s, cpu_s
        self.asks = asks  # a collective has failed on this rank, and the rank asks for the culprit
        self.way = way  # (step, checksum of the step before, checksums by number of collectives so far)

    @property
    def waits(self) -> bool:
        return self.asks or self.phase == _COLLECTIVE

    @property
    def key(self) -> str:
        """The phase or collective for which a time limit is learned."""
        return self.what or self.phase

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def where(self) -> str:
        """The position in words, such as "backward of step 7, microbatch 1, stage 0"."""
        place = f"collective ({self.what})" if self.phase == _COLLECTIVE else self.phase
        step = f"{place} of step {self.step}" if self.step >= 0 else place
        microbatch = f", microbatch {self.microbatch}" if self.microbatch >= 0 else ""
        return step + microbatch + (f", stage {self.stage}" if self.stage >= 0 else "")


class Verdict:
    def __init__(self, kind: str, rows: list[RankRow], what: str) -> None:
        self.kind, self.rows, self.what = kind, rows, what

    @property
    def ranks(self) -> list[int]:
        return [row.rank for row in self.rows]


class Limits:
    """Time limits per phase: ten times the longest time seen in this run, within FLOOR_S and `timeout_s`."""

    def __init__(self, timeout_s: float, before: dict[str, float] | None = None) -> None:
        """Create the limits; `before` has the longest times of earlier starts, in seconds.

        Those times can only raise a limit: this start may have other settings or no caches, so a phase has a limit of
        its own only after this start has passed it.
        """
        self.timeout_s, self.before = timeout_s, before or {}
        self.longest: dict[str, float] = {}
        self.first_step: int | None = None  # first step of this start
        self.in_force = False

    def learn(self, seen: dict[str, float]) -> None:
        for key, seconds in seen.items():
            self.longest[key] = max(seconds, self.longest.get(key, 0.0), self.before.get(key, 0.0))

    def reach(self, step: int) -> None:
        """Record a step; the limits take effect once the first step is done.

        Before that, the times of a rank that has built say little about how long others load or compile.
        """
        if step >= 0:
            self.first_step = step if self.first_step is None else min(step, self.first_step)
            self.in_force = self.in_force or step > self.first_step

    def of(self, key: str) -> float:
        longest = self.longest.get(key)
        if longest is None or not self.in_force:
            return self.timeout_s
        return min(self.timeout_s, max(FLOOR_S, FACTOR * longest))


def judge(rows: list[RankRow], limits: Limits, asked: bool = False) -> Verdict | None:
    """Return a verdict, or None if no rank is to blame yet.

    `asked`: a collective has failed, so a rank is to blame already, whatever the limits.
    """
    live = [row for row in rows if row.state in (RUNNING, STOPPED)]
    if verdict := _ended(rows):
        # because: gloo aborts a process whose peer sends another message than expected
        amid = verdict.kind == LOST_KIND and all(row.waits for row in verdict.rows)
        for find, how in ((_strays, _STRAYED), (_odd, _LEFT_OUT)):
            if amid and (to_blame := find(live + verdict.rows)):
                return Verdict(HANG_KIND, to_blame, _words(to_blame, live, limits, how))
        return verdict
    # because: a rank that is alone, or the last, has no peer that waits for it
    if len(live) < 2 or not (asked or _is_due(live, limits)):
        return None
    for suspects, how in (
        ([row for row in live if row.state == STOPPED], "is stopped by a signal"),
        ([row for row in live if row.silent_s > _silence(limits)], "is not heard of any more"),
        (_strays(live), _STRAYED),
        (_late(live, limits, asked), ""),
        (_odd(live), _LEFT_OUT),
    ):
        if suspects:
            suspects.sort(key=lambda row: -row.stood_s)
            return Verdict(HANG_KIND, suspects, _words(suspects, live, limits, how))
    if asked:
        return None
    return Verdict(HANG_KIND, live, _words(live[:1], live, limits, "waits for others that wait for it"))


def _ended(rows: list[RankRow]) -> Verdict | None:
    """Return the verdict on ranks that are gone; an error of a rank's own takes precedence over the loss of a peer."""
    failed, lost = ([row for row in rows if row.state == state] for state in (FAILED, LOST))
    ended = [row for row in failed if row.code != 76] or lost or failed
    if not ended:
        return None
    row = ended[0]
    others = f", and {len(ended) - 1} more" if len(ended) > 1 else ""
    if ended is lost:
        return Verdict(LOST_KIND, ended, f"{row.who}{others} {row.said or 'is gone'}: it was in {row.where}.")
    said = row.said if row.said.endswith((".", "!", "?")) else f"{row.said}."
    return Verdict(FAILED_KIND, ended, f"{row.who}{others} ended in {row.where}: {said}")


def _silence(limits: Limits) -> float:
    return min(limits.timeout_s, SILENT_S)


def _is_due(live: list[RankRow], limits: Limits) -> bool:
    over = [row for row in live if row.stood_s > limits.of(row.key)]
    if any(row.state == STOPPED for row in over) or any(row.silent_s > _silence(limits) for row in live):
        return True
    if any(not row.waits and row not in over for row in live):
        return False  # because: others may wait for this rank, and its limit has not passed
    return any(not row.waits for row in over) or len(over) == len(live)


def _late(live: list[RankRow], limits: Limits, asked: bool) -> list[RankRow]:
    """Return the ranks that do not wait while others do, or (unless `asked`) have exceeded their limit."""
    busy = [row for row in live if not row.waits]
    if not asked:
        return [row for row in busy if row.stood_s > limits.of(row.key)]
    return busy if len(busy) < len(live) else []


def _strays(live: list[RankRow]) -> list[RankRow]:
    """Return the ranks whose collectives of this step came in another order than those of ranks of their kind.

    Orders are compared as far as both ranks have come. Ranks are of one kind if their collectives had the same order in
    the previous step. The smaller groups of a kind are the strays; without a single largest group there is no verdict.
    """
    kinds: dict[tuple[int, int], list[RankRow]] = {}
    for row in live:
        if row.way and row.way[0] == row.step and row.way[1]:
            kinds.setdefault(row.way[:2], []).append(row)
    strays = []
    for rows in kinds.values():
        parties: list[list[RankRow]] = []
        for row in rows:
            party = next((one for one in parties if all(_agree(row, other) for other in one)), None)
            if party is None:
                parties.append([row])
            else:
                party.append(row)
        parties.sort(key=len, reverse=True)
        if len(parties) > 1 and len(parties[0]) > len(parties[1]):
            strays += [row for party in parties[1:] for row in party]
    return strays


def _agree(a: RankRow, b: RankRow) -> bool:
    assert a.way is not None
    assert b.way is not None
    common = max(a.way[2].keys() & b.way[2].keys(), default=0)
    return a.way[2].get(common) == b.way[2].get(common)


def _odd(live: list[RankRow]) -> list[RankRow]:
    """Return the ranks to blame if all wait in collectives: a changed order of collectives, or a position ahead."""
    newest = max((row.odd[0] for row in live if row.odd), default=0)
    # because: a collective that is new on all ranks, such as the first validation's, is no rank's fault
    strange = [row for row in live if row.odd and row.odd[0] == newest and newest > 0 and newest >= row.step - 1]
    if 0 < len(strange) < len(live):
        return strange
    ahead = max((row.step, row.count) for row in live)
    found = [row for row in live if (row.step, row.count) == ahead]
    return found if len(found) < len(live) and len({row.step for row in live}) > 1 else []


def _words(suspects: list[RankRow], live: list[RankRow], limits: Limits, how: str) -> str:
    row = suspects[0]
    text = f"{row.who} has been in {row.where}, for {row.stood_s:.0f} s"
    if how in (_LEFT_OUT, _STRAYED):
        odd = row.odd if how == _LEFT_OUT or (row.odd and row.odd[0] == row.step) else None
        text += f" and {how}" + (f": in step {odd[0]} came {odd[2]} where {odd[1]} used to" if odd else "")
    elif how:
        text += f" and {how}"
    if len(suspects) > 1:
        text += f" ({_ranks(suspects[1:])} too)"
    waiting = [one for one in live if one not in suspects and one.waits]
    if waiting:
        wait = "waits" if len(waiting) == 1 else "wait"
        text += f", while {_ranks(waiting)} {wait} in {waiting[0].where}"
    given = f"It is given {limits.of(row.key):.0f} s, by parallel.timeout_s={limits.timeout_s:g} and this run's times."
    return f"{text}. {given}"


def _ranks(rows: list[RankRow]) -> str:
    numbers = [str(row.rank) for row in rows]
    if len(numbers) > 8:
        return f"{len(numbers)} others"
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
