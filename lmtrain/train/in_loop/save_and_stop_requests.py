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
from lmtrain.observe.measure.process_and_gpu_memory import Memory
from lmtrain.parallel.mesh import GroupPeers, Mesh
from lmtrain.runfolder.file_names import SAVE_FILE, STOP_FILE, TRACE_FILE
from lmtrain.runfolder.read_and_record_run_end import request_file_cause
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.process_environment import SlurmJob, command_start_s
from lmtrain.runtime.processes.stop_signals import STOP_NAMES, StopRequest
from lmtrain.train.run_objects_and_resume import Run
from lmtrain.train.step_and_save_durations import EVALUATION, VALIDATION, Durations
from lmtrain.train.straggler_watch import StragglerWatch, build_straggler_watch
from lmtrain.units import format_seconds

SAVE, STOP = 1, 2
NO_TIME_FOR = {VALIDATION: 4, EVALUATION: 8}
TRACE = 16
_REQUEST_BITS, _RANK_BITS = 8, 20  # because: both, and memory up to 32 TiB in KiB, fit in 63 bits
_CHECK_INTERVAL_S = 1.0  # between looks at the folder, which may be on a slow disk
# share of the initial time left, and its limit: for ending processes and delays
_MARGIN_SHARE, _MAX_MARGIN_S = 0.05, 15.0
_QUERY_INTERVAL_S = 300.0  # because: a job's limit seldom changes, and every query loads Slurm's single controller
_SCONTROL_TIMEOUT_S = 30.0  # timeout of scontrol


@dataclass
class RequestSource:
    """A source of requests, such as a signal or a file in the run's folder. It is on rank 0 only or on all ranks alike;
    the maximum of its numbers over all ranks counts. By itself it requests nothing: it stands on the other ranks for a
    source that only rank 0 has (the clock, files in the run folder).
    """

    cause: str  # text for stop.json, the view and the last message; the same on every rank

    def requested(self) -> int:
        """Return the requests made now, as a sum of flags such as SAVE and STOP, or 0. Called about once per step; must
        not block.
        """
        return 0

    def on_done(self, request: int) -> None:
        """React to a request, such as SAVE, that was carried out, whichever source made it."""

    def receive_maximum(self, maximum: int) -> None:
        """Use the maximum over all ranks of the numbers that this source's `requested` returned."""


@dataclass
class SignalSource(RequestSource):
    """A source that requests a stop once the signal whose name is `cause`, such as SIGTERM, was received."""

    stop: StopRequest

    def requested(self) -> int:
        return STOP if self.stop.requested == self.cause else 0


@dataclass
class Deadline(RequestSource):
    """A time limit: stops the run in time for its last save, and earlier skips measurements that would end too late."""

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
    """A source that makes a request while a file of a given name is in the run's folder. It looks once a second,
    because the disk may be slow.
    """

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
    """A source that requests a save once checkpoint.interval_s seconds have passed since the newest checkpoint
    began.
    """

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
    """A source that requests nothing: its number carries this rank's memory use, in bits above those of the requests,
    so that the vote's maximum is the memory of the fullest rank.
    """

    cause = "memory"

    def __init__(self, memory: Memory, clock: Callable[[], float]) -> None:
        self._memory, self._clock = memory, clock
        self._next_check_s, self._number = -math.inf, 0

    def requested(self) -> int:
        if self._clock() >= self._next_check_s:
            # because: reading the memory in use takes as long as a short step
            self._next_check_s = self._clock() + _CHECK_INTERVAL_S
            num_bytes, rank = self._memory.measure()
            self._number = (num_bytes // 1024 << _RANK_BITS | rank) << _REQUEST_BITS
        return self._number

    def receive_maximum(self, maximum: int) -> None:
        kib, rank = divmod(maximum >> _REQUEST_BITS, 1 << _RANK_BITS)
        self._memory.fullest_of_ranks = kib * 1024, rank


class Vote:
    """An exchange of numbers between all ranks that runs while a step computes. Each rank gets the same result, the
    maximum of each number over all ranks, after the same step.

    Nothing waits for the exchange. With several processes, a number counts after the step that follows it; with a
    single process, after the step in which it arose.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._peers = GroupPeers(mesh, current_phase.main, "the vote on a stop") if mesh.world.size > 1 else None
        self._num_reduced = 0
        self._receive: Callable[[], NDArray[np.int64]] | None = None
        self._rows = np.zeros((0, 0), np.int64)

    def start(self, own_numbers: Callable[[], Sequence[int]], extra: Sequence[int] = ()) -> None:
        """Start, before a step, to gather two lists of integers over all ranks, equally long on each: those that
        `own_numbers()` returns, whose maxima `finish` returns, and `extra`, of which `extra_rows` returns a row per
        rank.

        A single process sends nothing here.
        """
        if self._peers is not None:
            numbers = own_numbers()
            self._num_reduced, self._receive = len(numbers), self._peers.start_gather([*numbers, *extra])

    def finish(self, own_numbers: Callable[[], Sequence[int]]) -> list[int]:
        """Wait for the gather that `start` began, and return the maximum over all ranks of each number that
        `own_numbers()` returned there. In a run of a single process, call `own_numbers` now and return its numbers.
        """
        if self._receive is None:
            return list(own_numbers())
        self._rows = self._receive()
        return [int(number) for number in self._rows[:, : self._num_reduced].max(0)]

    def extra_rows(self) -> NDArray[np.int64] | None:
        """Return the numbers that the ranks passed to `start` as `extra`, one row per rank, after `finish`; None if
        there were none.
        """
        extra = self._rows[:, self._num_reduced :]
        return extra if extra.size else None


class Requests:
    """The requests to a run (save, stop, trace, skip a measurement) and their effect. Each rank acts on the same
    results of the vote.
    """

    def __init__(
        self, vote: Vote, report: Callable[[str], None] = lambda text: None, trace: Callable[[], None] = lambda: None,
        stragglers: StragglerWatch | None = None,
    ) -> None:  # fmt: skip
        """Begin without sources. `trace` is called when a trace of steps is requested.

        `report` receives messages on stops that no signal caused, and on slow ranks, which `stragglers` finds.
        """
        self._vote, self._report, self._trace, self._stragglers = vote, report, trace, stragglers
        self._sources: list[RequestSource] = []
        self.stopped_by: str | None = None  # the cause of the stop, or None; the same on every rank
        self._results: list[int] = []

    def add_sources(self, *sources: RequestSource) -> None:
        """Add sources of requests, in the same order on all ranks. If several sources request the same, the first one's
        cause is shown.
        """
        self._sources += sources

    def start_vote(self) -> None:
        """Send this rank's requests to all ranks, without waiting, before a step. `finish_vote` receives them after the
        step.
        """
        self._vote.start(self._own_requests, self._stragglers.numbers_to_send() if self._stragglers else ())

    def finish_vote(self) -> None:
        """Wait for the requests that all ranks sent by `start_vote`, and act on them: set `stopped_by` if any rank asks
        for a stop, start a trace if any asks for one, and on rank 0 report ranks that became slow. A requested save is
        left to the caller (`save_requested`).
        """
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
            self.report_done(TRACE)

    def vote_now(self) -> None:
        """Exchange stop, save and trace requests among all ranks during a validation or evaluation, and wait for the
        result. All ranks must call this the same number of times. Raise MeasurementCutOff, on every rank, if the run
        must stop.
        """
        self.start_vote()
        self.finish_vote()
        if self.stopped_by is not None:
            raise MeasurementCutOff

    def batches_until_stop(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield each of the `batches`, and exchange requests with all other ranks (`vote_now`) before each, so that all
        ranks must have equally many. Raise MeasurementCutOff, on every rank, if the run must stop.
        """
        for batch in batches:
            self.vote_now()
            yield batch

    @property
    def save_requested(self) -> bool:
        """True if any source requested a save in the last vote."""
        return self._first_cause(SAVE) is not None

    def lacks_time_for(self, name: str) -> bool:
        """Return whether too little time is left for the measurement `name` ("validation" or "evaluation"), as of the
        last vote; the same on every rank.
        """
        return self._first_cause(NO_TIME_FOR[name]) is not None

    def stop_if_no_time_for(self, name: str) -> bool:
        """Stop the run if too little time is left for the measurement `name` ("validation" or "evaluation"). Return
        whether the run stops, for this or any other cause.
        """
        self._stop_for(NO_TIME_FOR[name])
        return self.stopped_by is not None

    def report_done(self, request: int) -> None:
        """Tell all sources that `request`, SAVE or TRACE, was carried out, so that they end their request for it."""
        for source in self._sources:
            source.on_done(request)

    def _own_requests(self) -> list[int]:
        """Return a number per source: the requests that it makes on this rank now, as a sum of flags such as SAVE and
        STOP.
        """
        return [source.requested() for source in self._sources]

    def _first_cause(self, request: int) -> str | None:
        """Return the name of the signal, file or limit that made `request`, a flag such as SAVE or STOP, in the last
        vote: the first if several did, None if none did.
        """
        return next(
            (source.cause for source, result in zip(self._sources, self._results, strict=False) if result & request),
            None,
        )

    def _stop_for(self, request: int) -> None:
        """Store in `stopped_by` which signal, file or limit made `request`, a flag such as STOP, in the last vote,
        unless an earlier cause is stored. Do nothing if none made it.
        """
        cause = self._first_cause(request)
        if cause and self.stopped_by is None and cause not in STOP_NAMES:
            self._report(f"{cause}: stopping after this step")
        self.stopped_by = self.stopped_by or cause


@contextmanager
def open_requests(
    run: Run, stop: StopRequest, trace: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[Requests]:
    """Yield the Requests of a run, by which its loop learns when to stop, save or trace: from signals, the Slurm time
    limit, run.time_limit, files in the run's folder and checkpoint.interval_s. `stop` holds the received stop signal;
    `trace` is called if a trace of steps is requested. All ranks must call this.
    """
    is_rank_0, limit, save_interval = run.mesh.rank == 0, run.config.run.time_limit, run.config.checkpoint.saves_every_s
    run.durations.stragglers = build_straggler_watch(run.config, run.inputs.model, run.mesh, run.memory, run.hosts)
    requests = Requests(Vote(run.mesh), run.view.show_note, trace, run.durations.stragglers)
    requests.add_sources(*(SignalSource(name, stop) for name in STOP_NAMES), FullestMemory(run.memory, clock))
    with Allocation(SlurmJob.detect() if is_rank_0 else None) as allocation:
        limits: dict[str, Callable[[], float | None]] = {"the end of the allocation": allocation.left_s}
        if limit is not None:
            ends_s = command_start_s(stop.began_s) + limit
            limits[f"run.time_limit={format_seconds(limit)}"] = lambda: ends_s - clock()
        run.durations.left_s = lambda: min(
            (seconds for left_s in limits.values() if (seconds := left_s()) is not None), default=None
        )
        rank_0_sources: list[RequestSource] = [
            Deadline(cause, left_s, run.durations, lambda: run.writer.is_writing) for cause, left_s in limits.items()
        ]
        files = {STOP_FILE: STOP, SAVE_FILE: SAVE, TRACE_FILE: TRACE}
        rank_0_sources += [FileRequest(run.folder / name, request, clock) for name, request in files.items()]
        if save_interval is not None:
            rank_0_sources.append(SaveInterval(save_interval, clock))
        if is_rank_0:
            run.durations.load_earlier(run.folder)
        requests.add_sources(
            *(rank_0_sources if is_rank_0 else [RequestSource(source.cause) for source in rank_0_sources])
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

    def refresh(self, job_id: str) -> None:
        """Query the job's end once and keep it."""
        if (end := self._query(job_id)) is not None:
            self._set_end(end)

    def _set_end(self, end_unix_s: float) -> None:
        """Convert the Slurm job's end from Unix time to this process's monotonic clock and store it. A changed end
        shifts the stored one; an end in the past is ignored.
        """
        if self._reported_end is None or self._deadline_s is None:
            seconds_left = end_unix_s - self._wall_clock()
            if self._job is not None and self._job.began is not None:
                # because: a slow wall clock must not extend the time left
                seconds_left = min(seconds_left, end_unix_s - self._job.began)
            if seconds_left <= 0:
                return  # because: the job is running, so either the clock is wrong or the end belongs to another job
            self._deadline_s = self._clock() + seconds_left
        else:
            self._deadline_s += end_unix_s - self._reported_end
        self._reported_end = end_unix_s

    def _refresh_until_closed(self, job_id: str) -> None:
        if self._reported_end is None:
            self.refresh(job_id)
        while not self._closed.wait(_QUERY_INTERVAL_S):
            self.refresh(job_id)


def query_job_end(job_id: str) -> float | None:
    """Ask `scontrol show job` when the Slurm job ends. Return Unix time in seconds, or None if scontrol fails or the
    job has no time limit.
    """
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job_id],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_TIMEOUT_S,
        )
        return parse_job_end(result.stdout, job_id)
    return None


def parse_job_end(output: str, job_id: str) -> float | None:
    """Return the Slurm job's EndTime in `output`, as printed by `scontrol show job`, in Unix seconds; None if it is
    missing. The line is chosen by `job_id`, because scontrol prints a line for each task of a job array.
    """
    match = re.search(rf"^JobId={job_id} .*\bEndTime=(\S+)", output, re.MULTILINE)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(match[1]).timestamp() if match else None
    return None
