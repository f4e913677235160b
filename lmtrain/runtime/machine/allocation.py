"""Until when Slurm lets this job run: what the job was told at its start, and now and then what scontrol says of it.

Called by the loop, on the process that asks for all. Clocks of nodes may be wrong and may be set: the end is turned
into a duration once, and moves only by as much as Slurm moves it. Torch-free.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from lmtrain.runtime.processes.process import SlurmJob

_ASK_EVERY_S = 300.0  # because: a job is seldom given more time, and each question goes to the one controller
_SCONTROL_S = 30.0  # for its answer


class Allocation:
    """`with Allocation(job) as allocation:` and then `left_s()`, which never waits; None where no end is known."""

    def __init__(
        self,
        job: SlurmJob | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        ask: Callable[[str], float | None] | None = None,
    ) -> None:
        self._job, self._clock, self._wall, self._ask = job, clock, wall, ask or end_of
        self._told: float | None = None  # the end, by the clock of Slurm's controller
        self._deadline_s: float | None = None  # by ours
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
        """Ask once."""
        ends = self._ask(number)
        if ends is not None:
            self._take(ends)

    def _take(self, ends: float) -> None:
        if self._told is None or self._deadline_s is None:
            left = ends - self._wall()
            if self._job is not None and self._job.began is not None:
                left = min(left, ends - self._job.began)  # because: a clock that is slow must not lend time
            if left <= 0:
                return  # because: the job runs, so either the clock is wrong or what it was told is of another job
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
    """What scontrol says of this job; None where it does not answer or knows no end."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", number], capture_output=True, text=True, timeout=_SCONTROL_S
        )
        return end_in(done.stdout, number)
    return None


def end_in(said: str, number: str) -> float | None:
    """The line of this very job: asked for the number of an array, scontrol tells of all its tasks, and one has it."""
    found = re.search(rf"^JobId={number} .*\bEndTime=(\S+)", said, re.MULTILINE)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(found[1]).timestamp() if found else None
    return None
