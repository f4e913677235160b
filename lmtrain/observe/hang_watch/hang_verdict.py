"""The watchdog's decision: from a table of all ranks' positions, a verdict that names the ranks to blame for a hang.

Called by the hub a few times a second. The hub sends it to start_companion_and_raise_verdict.py, where rank 0 raises
and prints it as a PeerLostError; if rank 0 cannot, its companion prints it. Pure: no clock, no socket, no file. Imports
little, because each rank's companion has to start in milliseconds.
"""

from __future__ import annotations

MIN_LIMIT_S = 30.0  # because: a disk, a network or a busy machine sometimes stands still for some seconds
LIMIT_FACTOR = 10.0  # times the longest time seen
SILENT_S = 30.0  # because: on a busy machine a companion may not be scheduled for seconds
RUNNING, STOPPED, LOST, FAILED, DONE = "running", "stopped", "lost", "failed", "done"
LOST_KIND, FAILED_KIND, HANG_KIND = "lost", "failed", "hang"
_COLLECTIVE, _LEFT_OUT = "collective", "left out a collective"
_OTHER_ORDER = "ran other collectives in this step than ranks with which it agreed in the step before"


class RankRow:
    """The state of a rank: its position in the program, and for how long it has been there."""

    def __init__(
        self, rank: int, host: str = "", phase: str = "build", step: int = -1, microbatch: int = -1, stage: int = -1,
        collective: str = "", still_s: float = 0.0, state: str = RUNNING, count: int = 0,
        misordered: tuple[int, str, str] | None = None, reason: str = "", code: int = 0, silent_s: float = 0.0,
        cpu_s: float = 0.0, asks_culprit: bool = False, order: tuple[int, int, dict[int, int]] | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.host, self.phase, self.step = rank, host, phase, step
        self.microbatch, self.stage, self.collective, self.still_s = microbatch, stage, collective, still_s
        self.state, self.count, self.misordered, self.reason, self.code = state, count, misordered, reason, code
        self.silent_s, self.cpu_s = silent_s, cpu_s
        self.asks_culprit = asks_culprit  # a collective has failed on this rank, and the rank asks for the culprit
        self.order = order  # (step, checksum of the step before, checksums by number of collectives so far)

    @property
    def is_waiting(self) -> bool:
        """True if the rank is in a collective, and so cannot move on by itself."""
        return self.asks_culprit or self.phase == _COLLECTIVE

    @property
    def limit_key(self) -> str:
        """The phase or collective for which a time limit is learned."""
        return self.collective or self.phase

    @property
    def who(self) -> str:
        """The rank in words, such as "rank 3 on n7"."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def place(self) -> str:
        """The rank's position in words, such as "backward of step 7, microbatch 1, stage 0"."""
        place = f"collective ({self.collective})" if self.phase == _COLLECTIVE else self.phase
        step = f"{place} of step {self.step}" if self.step >= 0 else place
        microbatch = f", microbatch {self.microbatch}" if self.microbatch >= 0 else ""
        return step + microbatch + (f", stage {self.stage}" if self.stage >= 0 else "")


class Verdict:
    """A decision: its kind (LOST_KIND, FAILED_KIND or HANG_KIND), the ranks to blame, and a sentence or more."""

    def __init__(self, kind: str, rows: list[RankRow], text: str) -> None:
        self.kind, self.rows, self.text = kind, rows, text

    @property
    def ranks(self) -> list[int]:
        return [row.rank for row in self.rows]


class Limits:
    """Time limits per phase: ten times the longest time seen in this run, but at least MIN_LIMIT_S and at most
    `timeout_s`.
    """

    def __init__(self, timeout_s: float, earlier_s: dict[str, float] | None = None) -> None:
        """Create the limits; `earlier_s` has the longest times of earlier starts, in seconds.

        Those times can only raise a limit: this start may have other settings or no caches, so a phase has a limit of
        its own only after this start has passed it.
        """
        self.timeout_s, self.earlier_s = timeout_s, earlier_s or {}
        self.longest_s: dict[str, float] = {}
        self.first_step: int | None = None  # first step of this start
        self.in_force = False

    def record_times(self, longest_s: dict[str, float]) -> None:
        """Record the longest time of each phase or collective, in seconds, that a rank has reported."""
        for key, seconds in longest_s.items():
            self.longest_s[key] = max(seconds, self.longest_s.get(key, 0.0), self.earlier_s.get(key, 0.0))

    def record_step(self, step: int) -> None:
        """Record that a rank has reached training step `step`; a negative number is ignored. The time limits learned
        from measured times take effect once a rank is beyond the lowest step recorded.

        Before that, the times of a rank that has built say little about how long others load or compile.
        """
        if step >= 0:
            self.first_step = step if self.first_step is None else min(step, self.first_step)
            self.in_force = self.in_force or step > self.first_step

    def limit_s(self, key: str) -> float:
        """Return the time limit in seconds for `key`, a phase or the name of a collective: a rank that stays in it for
        longer counts as late.
        """
        longest = self.longest_s.get(key)
        if longest is None or not self.in_force:
            return self.timeout_s
        return min(self.timeout_s, max(MIN_LIMIT_S, LIMIT_FACTOR * longest))


def judge(rows: list[RankRow], limits: Limits, culprit_asked: bool = False) -> Verdict | None:
    """Return the verdict that names the ranks to blame for a hang or a failure, or None if nobody can be blamed yet.
    `rows` has the newest state of each rank. With `culprit_asked`, which means that a collective has failed on a rank,
    look for a rank to blame at once instead of waiting for the time limits.
    """
    live = [row for row in rows if row.state in (RUNNING, STOPPED)]
    if verdict := _ended_verdict(rows):
        # because: gloo aborts a process whose peer sends another message than expected
        lost_in_collectives = verdict.kind == LOST_KIND and all(row.is_waiting for row in verdict.rows)
        for find, problem in ((_strayed_ranks, _OTHER_ORDER), (_odd_ranks, _LEFT_OUT)):
            if lost_in_collectives and (to_blame := find(live + verdict.rows)):
                return Verdict(HANG_KIND, to_blame, _verdict_text(to_blame, live, limits, problem))
        return verdict
    # because: a rank that is alone, or the last, has no peer that waits for it
    if len(live) < 2 or not (culprit_asked or _is_due(live, limits)):
        return None
    for suspects, problem in (
        ([row for row in live if row.state == STOPPED], "is stopped by a signal"),
        ([row for row in live if row.silent_s > _silence_limit_s(limits)], "sends no heartbeats any more"),
        (_strayed_ranks(live), _OTHER_ORDER),
        (_late_ranks(live, limits, culprit_asked), ""),
        (_odd_ranks(live), _LEFT_OUT),
    ):
        if suspects:
            suspects.sort(key=lambda row: -row.still_s)
            return Verdict(HANG_KIND, suspects, _verdict_text(suspects, live, limits, problem))
    if culprit_asked:
        return None
    return Verdict(HANG_KIND, live, _verdict_text(live[:1], live, limits, "waits for ranks that wait for it"))


def _ended_verdict(rows: list[RankRow]) -> Verdict | None:
    """Return the verdict on the ranks that have failed or are lost, or None if there are none. Ranks that failed by an
    error of their own are blamed first, then lost ranks, then ranks that failed because of a peer.
    """
    failed, lost_ranks = ([row for row in rows if row.state == state] for state in (FAILED, LOST))
    ended = [row for row in failed if row.code != 76] or lost_ranks or failed
    if not ended:
        return None
    row = ended[0]
    others = f", and {len(ended) - 1} more" if len(ended) > 1 else ""
    if ended is lost_ranks:
        return Verdict(LOST_KIND, ended, f"{row.who}{others} {row.reason or 'is gone'}: it was in {row.place}.")
    reason = row.reason if row.reason.endswith((".", "!", "?")) else f"{row.reason}."
    return Verdict(FAILED_KIND, ended, f"{row.who}{others} ended in {row.place}: {reason}")


def _silence_limit_s(limits: Limits) -> float:
    """Return for how many seconds a rank may send no heartbeat."""
    return min(limits.timeout_s, SILENT_S)


def _is_due(live: list[RankRow], limits: Limits) -> bool:
    """Return True if it is time to decide which rank hangs: a rank stopped by a signal has exceeded its time limit, a
    rank has sent no message for too long, or all ranks outside of collectives have exceeded their limits (all ranks, if
    every one is in a collective). `live` has the ranks that have not ended.
    """
    over = [row for row in live if row.still_s > limits.limit_s(row.limit_key)]
    if any(row.state == STOPPED for row in over) or any(row.silent_s > _silence_limit_s(limits) for row in live):
        return True
    if any(not row.is_waiting and row not in over for row in live):
        return False  # because: others may wait for this rank, and its limit has not passed
    return any(not row.is_waiting for row in over) or len(over) == len(live)


def _late_ranks(live: list[RankRow], limits: Limits, culprit_asked: bool) -> list[RankRow]:
    """Return the ranks in `live` that are not waiting in a collective and have exceeded their time limit. With
    `culprit_asked` the limit is ignored: return all ranks that are not waiting, but an empty list if none of `live`
    waits.
    """
    busy = [row for row in live if not row.is_waiting]
    if not culprit_asked:
        return [row for row in busy if row.still_s > limits.limit_s(row.limit_key)]
    return busy if len(busy) < len(live) else []


def _strayed_ranks(live: list[RankRow]) -> list[RankRow]:
    """Return the ranks in `live` that ran other collectives than the majority in the current step. Only ranks that are
    in the same step, and that ran the same collectives in the step before, are compared with one another.

    Orders are compared as far as both ranks have come. The smaller groups of ranks with equal orders are the strays;
    without a single largest group there are none.
    """
    kinds: dict[tuple[int, int], list[RankRow]] = {}
    for row in live:
        if row.order and row.order[0] == row.step and row.order[1]:
            kinds.setdefault(row.order[:2], []).append(row)
    strays = []
    for rows in kinds.values():
        groups: list[list[RankRow]] = []
        for row in rows:
            group = next((some for some in groups if all(_same_order(row, member) for member in some)), None)
            if group is None:
                groups.append([row])
            else:
                group.append(row)
        groups.sort(key=len, reverse=True)
        if len(groups) > 1 and len(groups[0]) > len(groups[1]):
            strays += [row for group in groups[1:] for row in group]
    return strays


def _same_order(a: RankRow, b: RankRow) -> bool:
    """Return True if both ranks ran the same collectives in this step, compared by checksum up to the last collective
    that both have reached.
    """
    assert a.order is not None
    assert b.order is not None
    common = max(a.order[2].keys() & b.order[2].keys(), default=0)
    return a.order[2].get(common) == b.order[2].get(common)


def _odd_ranks(live: list[RankRow]) -> list[RankRow]:
    """Return the ranks to blame if all ranks in `live` wait in collectives: those that called a collective which their
    previous step did not have at this point, or else those furthest ahead in step and number of collectives. Empty if
    neither rule singles out some of the ranks.
    """
    newest = max((row.misordered[0] for row in live if row.misordered), default=0)
    # because: a collective that is new on all ranks, such as the first validation's, is no rank's fault
    misordered_ranks = [
        row for row in live
        if row.misordered and row.misordered[0] == newest and newest > 0 and newest >= row.step - 1
    ]  # fmt: skip
    if 0 < len(misordered_ranks) < len(live):
        return misordered_ranks
    ahead = max((row.step, row.count) for row in live)
    ahead_ranks = [row for row in live if (row.step, row.count) == ahead]
    return ahead_ranks if len(ahead_ranks) < len(live) and len({row.step for row in live}) > 1 else []


def _verdict_text(suspects: list[RankRow], live: list[RankRow], limits: Limits, problem: str) -> str:
    row = suspects[0]
    text = f"{row.who} has been in {row.place}, for {row.still_s:.0f} s"
    if problem in (_LEFT_OUT, _OTHER_ORDER):
        shows_order = problem == _LEFT_OUT or (row.misordered and row.misordered[0] == row.step)
        text += f" and {problem}"
        if row.misordered and shows_order:
            step, expected, actual = row.misordered
            text += f": in step {step} it went on to {actual}, where the step before had {expected}"
    elif problem:
        text += f" and {problem}"
    if len(suspects) > 1:
        text += f" ({_ranks_text(suspects[1:])} too)"
    waiting = [other for other in live if other not in suspects and other.is_waiting]
    if waiting:
        wait = "waits" if len(waiting) == 1 else "wait"
        text += f", while {_ranks_text(waiting)} {wait} in {waiting[0].place}"
    limit_s = limits.limit_s(row.limit_key)
    return f"{text}. Its limit is {limit_s:.0f} s, by parallel.timeout_s={limits.timeout_s:g} and this run's times."


def _ranks_text(rows: list[RankRow]) -> str:
    numbers = [str(row.rank) for row in rows]
    if len(numbers) > 8:
        return f"{len(numbers)} others"
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
