"""Requests checked at the end of each step: save, stop, trace, or skip a measurement; all ranks get the same answer.

Called by the loop. Signals, the clock, files in the run's folder and checkpoint.interval_s are each a `RequestSource`.
All requests are sent as a row of numbers in the vote that runs while a step computes, so that another source costs
nothing: pass a RequestSource to `Requests.add_sources`, on every rank, before the first step.
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
from lmtrain.train.durations import EVALUATION, VALIDATION, Durations, load_earlier_durations
from lmtrain.train.state import Run
from lmtrain.train.straggler_watch import StragglerWatch, build_straggler_watch
from lmtrain.units import format_seconds

SAVE, STOP = 1, 2
NO_TIME_FOR = {VALIDATION: 4, EVALUATION: 8}
TRACE = 16
_REQUEST_BITS, _RANK_BITS = 8, 20  # because: both, and memory up to 32 TiB in KiB, fit in 63 bits
_CHECK_INTERVAL_S = 1.0  # between looks at the folder, which may be on a slow disk
_MARGIN_SHARE, _MAX_MARGIN_S = (
    0.05,
    15.0,
)  # share of the initial time left, and its limit: for ending processes and delays
_QUERY_INTERVAL_S = 300.0  # because: a job's limit seldom changes, and every query loads Slurm's single controller
_SCONTROL_TIMEOUT_S = 30.0  # timeout of scontrol


class RequestSource:
    """A source of requests, from a single rank or from all ranks alike; the highest number over all ranks counts."""

    cause: str  # text for stop.json, the view and the last message; the same on every rank

    def requested(self) -> int:
        """Return the sum of SAVE, STOP and so on, or 0. Called about once per step; must not block."""
        return 0

    def on_done(self, request: int) -> None:
        """Handle that a request, such as SAVE, was carried out, from whichever source."""

    def receive_maximum(self, maximum: int) -> None:
        """Handle the maximum over all ranks of the numbers that this source sent."""


@dataclass
class PlaceholderSource(RequestSource):
    """Placeholder on ranks other than 0 for a source that only rank 0 has (the clock, files in the run folder)."""

    cause: str


@dataclass
class SignalSource(RequestSource):
    """A request to stop by a signal."""

    cause: str
    stop: StopRequest

    def requested(self) -> int:
        return STOP if self.stop.requested == self.cause else 0


@dataclass
class Deadline(RequestSource):
    """A time limit: stops the run in time for its last save, and earlier skips measurements that would end too late."""

    cause: str
    left_s: Callable[[], float | None]  # seconds; None if no end is known
    durations: Durations
    is_writing: Callable[[], bool]  # True during a save, which the last save must wait for
    margin_s: float | None = None  # set from the time left when the end first becomes known

    def requested(self) -> int:
        seconds_left = self.left_s()
        if seconds_left is None:
            return 0
        if self.margin_s is None:
            self.margin_s = max(0.0, min(_MARGIN_SHARE * seconds_left, _MAX_MARGIN_S))
        seconds_left -= self.margin_s + (2 if self.is_writing() else 1) * self.durations.save_s
        seconds_left -= 2 * self.durations.step_s  # because: the vote's result comes a step later
        missed = [request for name, request in NO_TIME_FOR.items() if seconds_left < self.durations.longest(name)]
        return sum(missed) + STOP * (seconds_left < 0)


class FileRequest(RequestSource):
    """A request by a file of this name in the run's folder. Checked once a second, because the disk may be slow."""

    def __init__(self, path: Path, request: int, clock: Callable[[], float]) -> None:
        self.cause = request_file_cause(path.name)
        self._path, self._request, self._clock = path, request, clock
        self._next_check_s, self._exists = clock(), False

    def requested(self) -> int:
        if not self._exists and self._clock() >= self._next_check_s:
            self._next_check_s, self._exists = self._clock() + _CHECK_INTERVAL_S, os.path.lexists(self._path)
        return self._request if self._exists else 0

    def on_done(self, request: int) -> None:
        if self._exists and self._request == request:
            self._path.unlink(missing_ok=True)
            self._exists = False


class SaveInterval(RequestSource):
    """A request to save checkpoint.interval_s after the newest checkpoint began."""

    cause = "checkpoint.interval_s"

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock, self._since_s = seconds, clock, clock()

    def requested(self) -> int:
        return SAVE if self._clock() - self._since_s >= self._seconds else 0

    def on_done(self, request: int) -> None:
        if request == SAVE:
            self._since_s = self._clock()


class MeasurementCutOff(Exception):
    """Raised on all ranks inside a measurement when the run must stop."""


class FullestMemory(RequestSource):
    """The fullest rank's memory, sent with the vote above the bits of all requests; requests nothing itself."""

    cause = "memory"

    def __init__(self, memory: Memory, clock: Callable[[], float]) -> None:
        self._memory, self._clock = memory, clock
        self._next_check_s, self._number = -math.inf, 0

    def requested(self) -> int:
        if self._clock() >= self._next_check_s:
            self._next_check_s = (
                self._clock() + _CHECK_INTERVAL_S
            )  # because: reading the memory in use takes as long as a short step
            num_bytes, rank = self._memory.measure()
            self._number = (num_bytes // 1024 << _RANK_BITS | rank) << _REQUEST_BITS
        return self._number

    def receive_maximum(self, maximum: int) -> None:
        kib, rank = divmod(maximum >> _REQUEST_BITS, 1 << _RANK_BITS)
        self._memory.set_fullest((kib * 1024, rank))


class Vote:
    """A maximum over all ranks that overlaps with a step; each process gets the same result after the same step.

    The exchange runs while the step computes, so nothing waits for it. With several processes, a number counts after
    the step that follows it; with a single process, after the step in which it arose.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._peers = GroupPeers(mesh, phases.main, "the vote on a stop") if mesh.world.size > 1 else None
        self._num_reduced = 0
        self._receive: Callable[[], NDArray[np.int64]] | None = None
        self._rows = np.zeros((0, 0), np.int64)

    def start(self, own_numbers: Callable[[], Sequence[int]], extra: Sequence[int] = ()) -> None:
        """Start the exchange, before a step. All ranks pass equally many numbers each time.

        The maxima of `own_numbers` are the result. The numbers in `extra` are not reduced; see `extra_rows`.
        """
        if self._peers is not None:
            numbers = own_numbers()
            self._num_reduced, self._receive = len(numbers), self._peers.start_gather([*numbers, *extra])

    def finish(self, own_numbers: Callable[[], Sequence[int]]) -> list[int]:
        """Return the maxima after the step, the same on every process.

        `own_numbers` is called only if there is a single process.
        """
        if self._receive is None:
            return list(own_numbers())
        self._rows = self._receive()
        return [int(number) for number in self._rows[:, : self._num_reduced].max(0)]

    def extra_rows(self) -> NDArray[np.int64] | None:
        """Return the extra numbers of each rank, a row per rank, after `finish`; None if there are none."""
        extra = self._rows[:, self._num_reduced :]
        return extra if extra.size else None


class Requests:
    """The requests to a run and their effect: each rank acts on the same results of the vote."""

    def __init__(
        self, vote: Vote, report: Callable[[str], None] = lambda text: None, trace: Callable[[], None] = lambda: None,
        stragglers: StragglerWatch | None = None,
    ) -> None:  # fmt: skip
        """Prepare without sources; `trace` starts a trace.

        `report` receives messages on stops that no signal caused, and on stragglers.
        """
        self._vote, self._report, self._trace, self._stragglers = vote, report, trace, stragglers
        self._sources: list[RequestSource] = []
        self.stopped_by: str | None = None  # the cause of the stop, or None; the same on every rank
        self._results: list[int] = []

    def add_sources(self, *sources: RequestSource) -> None:
        """Add sources, in the same order on all ranks; if several request the same, the first one's cause is shown."""
        self._sources += sources

    def start_vote(self) -> None:
        """Start the vote, before a step."""
        self._vote.start(self._own_requests, self._stragglers.numbers_to_send() if self._stragglers else ())

    def finish_vote(self) -> None:
        """Finish the vote, after the step, and act on its result."""
        self._results = self._vote.finish(self._own_requests)
        for source, maximum in zip(self._sources, self._results, strict=False):
            source.receive_maximum(maximum)
        if (
            self._stragglers is not None
            and self._stragglers.is_rank_0
            and (rows := self._vote.extra_rows()) is not None
        ):
            for line in self._stragglers.receive_rows(rows):
                self._report(line)
        self._stop_for(STOP)
        if self._first_cause(TRACE) is not None:
            self._trace()
            self._report_done(TRACE)

    def vote_now(self) -> None:
        """Vote within a measurement, on all ranks equally often. Raise MeasurementCutOff if the run must stop."""
        self.start_vote()
        self.finish_vote()
        if self.stopped_by is not None:
            raise MeasurementCutOff

    def batches_until_stop(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, with a vote before each; raise MeasurementCutOff if the run must stop."""
        for batch in batches:
            self.vote_now()
            yield batch

    @property
    def save_requested(self) -> bool:
        """True if any source requested a save in the last vote."""
        return self._first_cause(SAVE) is not None

    def lacks_time_for(self, name: str) -> bool:
        """Return whether too little time is left for a measurement, by the last vote; the same on every rank."""
        return self._first_cause(NO_TIME_FOR[name]) is not None

    def stop_if_no_time_for(self, name: str) -> bool:
        """Stop the run if too little time is left for this measurement; return whether the run stops, for any cause."""
        self._stop_for(NO_TIME_FOR[name])
        return self.stopped_by is not None

    def report_saved(self) -> None:
        """Report to all sources that a checkpoint has begun."""
        self._report_done(SAVE)

    def _report_done(self, request: int) -> None:
        """Report to all sources that this request was carried out."""
        for source in self._sources:
            source.on_done(request)

    def _own_requests(self) -> list[int]:
        """Return the numbers that this rank's sources request now."""
        return [source.requested() for source in self._sources]

    def _first_cause(self, request: int) -> str | None:
        """Return the cause of the first source that made this request in the last vote, or None."""
        return next(
            (source.cause for source, result in zip(self._sources, self._results, strict=False) if result & request),
            None,
        )

    def _stop_for(self, request: int) -> None:
        """Set `stopped_by` if this request was made in the last vote."""
        cause = self._first_cause(request)
        if cause and self.stopped_by is None and cause not in STOP_NAMES:
            self._report(f"{cause}: stopping after this step")
        self.stopped_by = self.stopped_by or cause


@contextmanager
def requests_of(
    run: Run, stop: StopRequest, trace: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[Requests]:
    """Yield the requests of this run, with sources in the order in which causes are shown. All ranks take part."""
    is_rank_0, limit, save_interval = run.mesh.rank == 0, run.config.run.time_limit, run.config.checkpoint.saves_every_s
    run.durations.stragglers = build_straggler_watch(run.config, run.inputs.model, run.mesh, run.memory)
    requests = Requests(Vote(run.mesh), run.view.show_note, trace, run.durations.stragglers)
    requests.add_sources(*(SignalSource(name, stop) for name in STOP_NAMES), FullestMemory(run.memory, clock))
    rank_0_sources: list[RequestSource] = []
    saves = run.durations, lambda: run.writer.is_writing
    with Allocation(SlurmJob.detect() if is_rank_0 else None) as allocation:
        rank_0_sources.append(Deadline("the end of the allocation", allocation.left_s, *saves))
        if limit is not None:
            ends_s = command_start_s(stop.began_s) + limit
            rank_0_sources.append(Deadline(f"run.time_limit={format_seconds(limit)}", lambda: ends_s - clock(), *saves))
        limits = [source.left_s for source in rank_0_sources if isinstance(source, Deadline)]
        run.durations.left_s = lambda: min(
            (seconds for source in limits if (seconds := source()) is not None), default=None
        )
        files = {STOP_FILE: STOP, SAVE_FILE: SAVE, TRACE_FILE: TRACE}
        rank_0_sources += [FileRequest(run.folder / name, request, clock) for name, request in files.items()]
        if save_interval is not None:
            rank_0_sources.append(SaveInterval(save_interval, clock))
        if is_rank_0:
            load_earlier_durations(run.folder, run.durations)
        requests.add_sources(
            *(rank_0_sources if is_rank_0 else [PlaceholderSource(source.cause) for source in rank_0_sources])
        )
        yield requests


class Allocation:
    """The end of a Slurm job, refreshed by a thread within the `with` block.

    `left_s()` never blocks; it returns None if no end is known.
    """

    def __init__(
        self,
        job: SlurmJob | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        query: Callable[[str], float | None] | None = None,
    ) -> None:
        self._job, self._clock, self._wall_clock, self._query = job, clock, wall_clock, query or query_job_end
        self._reported_end: float | None = None  # the end as Unix time, by the clock of Slurm's controller
        self._deadline_s: float | None = None  # the end by our own clock
        self._closed = threading.Event()
        if job is not None and job.ends is not None:
            self._set_end(job.ends)

    def __enter__(self) -> Allocation:
        if self._job is not None:
            threading.Thread(
                target=self._refresh_until_closed, args=(self._job.number,), name="allocation", daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def left_s(self) -> float | None:
        """Return the seconds until the job ends, or None if no end is known."""
        return None if self._deadline_s is None else self._deadline_s - self._clock()

    def refresh(self, number: str) -> None:
        """Query the job's end once and keep it."""
        if (end := self._query(number)) is not None:
            self._set_end(end)

    def _set_end(self, end: float) -> None:
        """Take the job's end, as Unix time, and convert it to this process's clock."""
        if self._reported_end is None or self._deadline_s is None:
            seconds_left = end - self._wall_clock()
            if self._job is not None and self._job.began is not None:
                seconds_left = min(
                    seconds_left, end - self._job.began
                )  # because: a slow wall clock must not extend the time left
            if seconds_left <= 0:
                return  # because: the job is running, so either the clock is wrong or the end belongs to another job
            self._deadline_s = self._clock() + seconds_left
        else:
            self._deadline_s += end - self._reported_end
        self._reported_end = end

    def _refresh_until_closed(self, number: str) -> None:
        if self._reported_end is None:
            self.refresh(number)
        while not self._closed.wait(_QUERY_INTERVAL_S):
            self.refresh(number)


def query_job_end(number: str) -> float | None:
    """Return the job's end as Unix time from `scontrol show job`, or None if scontrol fails or the job has no limit."""
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", number],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_TIMEOUT_S,
        )
        return parse_job_end(result.stdout, number)
    return None


def parse_job_end(output: str, number: str) -> float | None:
    """Return the end of this job in scontrol's output as Unix time, or None. For an array, that lists all tasks."""
    match = re.search(rf"^JobId={number} .*\bEndTime=(\S+)", output, re.MULTILINE)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(match[1]).timestamp() if match else None
    return None
