"""Requests checked at the end of each step: save, stop, trace, or skip a measurement; all ranks get the same answer.

Called by the loop. Signals, the clock, files in the run's folder and checkpoint.interval_s are each an `Asker`. All
requests are sent as a row of numbers in the vote that runs while a step computes, so that another asker costs nothing:
pass `Requests.join` an object with a `cause` and `wants()`, on every rank, before the first step.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import Batch
from lmtrain.observe.measure import phases
from lmtrain.observe.measure.memory import Memory
from lmtrain.parallel.mesh import GroupPeers, Mesh
from lmtrain.runfolder.ends import request_file_cause
from lmtrain.runfolder.names import SAVE_FILE, STOP_FILE, TRACE_FILE
from lmtrain.runtime.processes.process import SlurmJob, command_start_s
from lmtrain.runtime.processes.signals import STOP_NAMES, StopRequest
from lmtrain.train.costs import EVALUATION, VALIDATION, Costs, measured_before
from lmtrain.train.pace import Pace, pace_of
from lmtrain.train.state import Run
from lmtrain.units import format_seconds

SAVE, STOP = 1, 2
NO_TIME_FOR = {VALIDATION: 4, EVALUATION: 8}
TRACE = 16
_WISH_BITS, _RANK_BITS = 8, 20  # because: both, and memory up to 32 TiB in KiB, fit in 63 bits
_LOOK_S = 1.0  # between looks at the folder, which may be on a slow disk
_MARGIN, _MOST_MARGIN_S = 0.05, 15.0  # share of the initial time left, and its limit: for ending processes and delays
_ASK_EVERY_S = 300.0  # because: a job's limit seldom changes, and every query loads Slurm's single controller
_SCONTROL_S = 30.0  # timeout of scontrol


class Asker:
    """A source of requests, from a single rank or from all ranks alike; the highest number over all ranks counts."""

    cause: str  # text for stop.json, the view and the last message; the same on every rank

    def wants(self) -> int:
        """Return the sum of SAVE, STOP and so on, or 0. Called about once per step; must not block."""
        return 0

    def done(self, wish: int) -> None:
        """Handle that the request `wish` was carried out, for whichever asker."""

    def hear(self, highest: int) -> None:
        """Handle the highest number over all ranks."""


@dataclass
class Silent(Asker):
    """Placeholder on ranks other than 0 for an asker that only rank 0 runs (the clock, files in the run folder)."""

    cause: str


@dataclass
class Signal(Asker):
    cause: str
    stop: StopRequest

    def wants(self) -> int:
        return STOP if self.stop.requested == self.cause else 0


@dataclass
class Deadline(Asker):
    """A time limit: stops the run in time for its last save, and earlier skips measurements that would end too late."""

    cause: str
    left_s: Callable[[], float | None]  # seconds; None if no end is known
    costs: Costs
    is_writing: Callable[[], bool]  # True during a save, which the last save must wait for
    margin_s: float | None = None  # set from the time left when the end first becomes known

    def wants(self) -> int:
        left = self.left_s()
        if left is None:
            return 0
        if self.margin_s is None:
            self.margin_s = max(0.0, min(_MARGIN * left, _MOST_MARGIN_S))
        left -= self.margin_s + (2 if self.is_writing() else 1) * self.costs.save_s
        left -= 2 * self.costs.step_s  # because: the vote's result comes a step later
        late = [wish for name, wish in NO_TIME_FOR.items() if left < self.costs.longest(name)]
        return sum(late) + STOP * (left < 0)


class File(Asker):
    """A request by a file of this name in the run's folder. Checked once a second, because the disk may be slow."""

    def __init__(self, path: Path, wish: int, clock: Callable[[], float]) -> None:
        self.cause = request_file_cause(path.name)
        self._path, self._wish, self._clock = path, wish, clock
        self._next_s, self._there = clock(), False

    def wants(self) -> int:
        if not self._there and self._clock() >= self._next_s:
            self._next_s, self._there = self._clock() + _LOOK_S, os.path.lexists(self._path)
        return self._wish if self._there else 0

    def done(self, wish: int) -> None:
        if self._there and self._wish == wish:
            self._path.unlink(missing_ok=True)
            self._there = False


class Interval(Asker):
    """A request to save checkpoint.interval_s after the newest checkpoint began."""

    cause = "checkpoint.interval_s"

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock, self._since_s = seconds, clock, clock()

    def wants(self) -> int:
        return SAVE if self._clock() - self._since_s >= self._seconds else 0

    def done(self, wish: int) -> None:
        if wish == SAVE:
            self._since_s = self._clock()


class CutOff(Exception):
    """Raised on all ranks inside a measurement when the run must stop."""


class Fullest(Asker):
    """The fullest rank's memory, sent with the vote above the bits of all requests; requests nothing itself."""

    cause = "memory"

    def __init__(self, memory: Memory, clock: Callable[[], float]) -> None:
        self._memory, self._clock = memory, clock
        self._next_s, self._mine = -math.inf, 0

    def wants(self) -> int:
        if self._clock() >= self._next_s:
            self._next_s = self._clock() + _LOOK_S  # because: reading the memory in use takes as long as a short step
            num_bytes, rank = self._memory.now()
            self._mine = (num_bytes // 1024 << _RANK_BITS | rank) << _WISH_BITS
        return self._mine

    def hear(self, highest: int) -> None:
        kib, rank = divmod(highest >> _WISH_BITS, 1 << _RANK_BITS)
        self._memory.hear((kib * 1024, rank))


class Vote:
    """A maximum over all ranks that overlaps with a step; each process gets the same result after the same step.

    The exchange runs while the step computes, so nothing waits for it. With several processes, a number counts after
    the step that follows it; with a single process, after the step in which it arose.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._peers = GroupPeers(mesh, phases.main, "the vote on a stop") if mesh.world.size > 1 else None
        self._num_asked = 0
        self._hear: Callable[[], NDArray[np.int64]] | None = None
        self._rows = np.zeros((0, 0), np.int64)

    def ask(self, mine: Callable[[], Sequence[int]], told: Sequence[int] = ()) -> None:
        """Start the exchange, before a step. All ranks pass equally many numbers each time.

        The numbers in `told` are not reduced; see `heard`.
        """
        if self._peers is not None:
            asked = mine()
            self._num_asked, self._hear = len(asked), self._peers.start_gather([*asked, *told])

    def answer(self, mine: Callable[[], Sequence[int]]) -> list[int]:
        """Return the maxima after the step, the same on every process."""
        if self._hear is None:
            return list(mine())
        self._rows = self._hear()
        return [int(number) for number in self._rows[:, : self._num_asked].max(0)]

    def heard(self) -> NDArray[np.int64] | None:
        """Return the rows of `told` by rank, after `answer`; None if there are none."""
        told = self._rows[:, self._num_asked :]
        return told if told.size else None


class Requests:
    def __init__(
        self, vote: Vote, say: Callable[[str], None] = lambda text: None, trace: Callable[[], None] = lambda: None,
        pace: Pace | None = None,
    ) -> None:  # fmt: skip
        """Prepare without askers; `trace` starts a trace.

        `say` receives messages on stops that no signal caused, and on stragglers.
        """
        self._vote, self._say, self._trace, self._pace = vote, say, trace, pace
        self._askers: list[Asker] = []
        self.stop: str | None = None  # the cause of the stop, or None; the same on every rank
        self._numbers: list[int] = []

    def join(self, *askers: Asker) -> None:
        """Add askers, in the same order on all ranks; if several request the same, the first one's cause is shown."""
        self._askers += askers

    def ask(self) -> None:
        """Start the vote, before a step."""
        self._vote.ask(self._wants, self._pace.tell() if self._pace else ())

    def answer(self) -> None:
        """Finish the vote, after the step, and act on its result."""
        self._numbers = self._vote.answer(self._wants)
        for asker, number in zip(self._askers, self._numbers, strict=False):
            asker.hear(number)
        if self._pace is not None and self._pace.leads and (told := self._vote.heard()) is not None:
            for line in self._pace.hear(told):
                self._say(line)
        self._stop_for(STOP)
        if self._first(TRACE) is not None:
            self._trace()
            self._done(TRACE)

    def look(self) -> None:
        """Vote within a measurement, on all ranks equally often. Raise CutOff on all ranks if the run must stop."""
        self.ask()
        self.answer()
        if self.stop is not None:
            raise CutOff

    def until_stop(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.look()
            yield batch

    @property
    def save(self) -> bool:
        return self._first(SAVE) is not None

    def has_no_time_for(self, name: str) -> bool:
        """Return whether too little time is left for a measurement, by the last vote; the same on every rank."""
        return self._first(NO_TIME_FOR[name]) is not None

    def stop_without_time_for(self, name: str) -> bool:
        """Stop the run if too little time is left for this measurement; return whether the run stops, for any cause."""
        self._stop_for(NO_TIME_FOR[name])
        return self.stop is not None

    def saved(self) -> None:
        """Report to all askers that a checkpoint has begun."""
        self._done(SAVE)

    def _done(self, wish: int) -> None:
        for asker in self._askers:
            asker.done(wish)

    def _wants(self) -> list[int]:
        return [asker.wants() for asker in self._askers]

    def _first(self, wish: int) -> str | None:
        """Return the cause of the first asker that requested `wish` in the last vote, or None."""
        return next((one.cause for one, has in zip(self._askers, self._numbers, strict=False) if has & wish), None)

    def _stop_for(self, wish: int) -> None:
        cause = self._first(wish)
        if cause and self.stop is None and cause not in STOP_NAMES:
            self._say(f"{cause}: stopping after this step")
        self.stop = self.stop or cause


@contextmanager
def requests_of(
    run: Run, stop: StopRequest, trace: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[Requests]:
    """Yield the requests of this run, with askers in the order in which causes are shown. All ranks take part."""
    leads, limit, every = run.mesh.rank == 0, run.config.run.time_limit, run.config.checkpoint.every_s
    run.costs.pace = pace_of(run.config, run.inputs.model, run.mesh, run.memory)
    requests = Requests(Vote(run.mesh), run.view.note, trace, run.costs.pace)
    requests.join(*(Signal(name, stop) for name in STOP_NAMES), Fullest(run.memory, clock))
    own: list[Asker] = []
    saves = run.costs, lambda: run.writer.is_writing
    with Allocation(SlurmJob.detect() if leads else None) as allocation:
        own.append(Deadline("the end of the allocation", allocation.left_s, *saves))
        if limit is not None:
            ends_s = command_start_s(stop.began_s) + limit
            own.append(Deadline(f"run.time_limit={format_seconds(limit)}", lambda: ends_s - clock(), *saves))
        limits = [one.left_s for one in own if isinstance(one, Deadline)]
        run.costs.left_s = lambda: min((left for one in limits if (left := one()) is not None), default=None)
        files = {STOP_FILE: STOP, SAVE_FILE: SAVE, TRACE_FILE: TRACE}
        own += [File(run.folder / name, wish, clock) for name, wish in files.items()]
        if every is not None:
            own.append(Interval(every, clock))
        if leads:
            measured_before(run.folder, run.costs)
        requests.join(*(own if leads else [Silent(asker.cause) for asker in own]))
        yield requests


class Allocation:
    """The end of a Slurm job, refreshed by a thread within the `with` block.

    `left_s()` never blocks; its value is None if no end is known.
    """

    def __init__(
        self,
        job: SlurmJob | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        ask: Callable[[str], float | None] | None = None,
    ) -> None:
        self._job, self._clock, self._wall, self._ask = job, clock, wall, ask or end_of
        self._told: float | None = None  # the end as Unix time, by the clock of Slurm's controller
        self._deadline_s: float | None = None  # the end by our own clock
        self._over = threading.Event()
        if job is not None and job.ends is not None:
            self._take(job.ends)

    def __enter__(self) -> Allocation:
        if self._job is not None:
            threading.Thread(target=self._keep_asking, args=(self._job.number,), name="allocation", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - self._clock()

    def look(self, number: str) -> None:
        """Query the job's end once and keep it."""
        if (ends := self._ask(number)) is not None:
            self._take(ends)

    def _take(self, ends: float) -> None:
        if self._told is None or self._deadline_s is None:
            left = ends - self._wall()
            if self._job is not None and self._job.began is not None:
                left = min(left, ends - self._job.began)  # because: a slow wall clock must not extend the time left
            if left <= 0:
                return  # because: the job is running, so either the clock is wrong or the end belongs to another job
            self._deadline_s = self._clock() + left
        else:
            self._deadline_s += ends - self._told
        self._told = ends

    def _keep_asking(self, number: str) -> None:
        if self._told is None:
            self.look(number)
        while not self._over.wait(_ASK_EVERY_S):
            self.look(number)


def end_of(number: str) -> float | None:
    """Return the job's end as Unix time from `scontrol show job`, or None if scontrol fails or the job has no limit."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", number], capture_output=True, text=True, timeout=_SCONTROL_S
        )
        return end_in(done.stdout, number)
    return None


def end_in(said: str, number: str) -> float | None:
    """Return the end of this job in scontrol's output; None if absent. For an array, the output lists all tasks."""
    found = re.search(rf"^JobId={number} .*\bEndTime=(\S+)", said, re.MULTILINE)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(found[1]).timestamp() if found else None
    return None
