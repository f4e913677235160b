"""Whether a run that has ended will start again, because its Slurm job is in the queue once more.

Called by `lmtrain watch`, so that it does not end in the gap before the job's next start. Depends on squeue: where
there is none, or the run is of no Slurm job, no start is expected.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from lmtrain.errors import StoppedForGood
from lmtrain.runfolder.file_names import ENVIRONMENT, SLURM_JOB
from lmtrain.runfolder.read_and_record_run_end import read_object_or_empty

_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING", "COMPLETING", "SPECIAL_EXIT")
_QUERY_S = 15.0  # because: every query loads Slurm's single controller
_START_S = 300.0  # after the job has begun to run again, until the run holds its folder: nodes, srun, imports
_TIMEOUT_S = 10.0  # of squeue


class QueuedJob:
    """The Slurm job of a run, looked at while the run is over."""

    def __init__(
        self, run: Path, query: Callable[[str], str] | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._run, self._query, self._clock = run, query or query_job_state, clock
        self._asked_s: float | None = None
        self._waiting_s: float | None = None  # when the job was last seen to wait for its next start
        self._state = ""

    def describe_wait(self, state: Mapping[str, Any]) -> str:
        """Return a clause on the job for which the run waits, or "" if it will not start again. `state` is that of the
        run, as `read_run_state` returns it.
        """
        stop = state["stopped"] if isinstance(state["stopped"], dict) else {}
        number = str(read_object_or_empty(self._run / ENVIRONMENT).get(SLURM_JOB) or "")
        is_for_good = state["state"] == "finished" or stop.get("exit_code") == StoppedForGood.exit_code
        if is_for_good or not number.isdecimal():
            return ""
        now_s = self._clock()
        if self._asked_s is None or now_s - self._asked_s >= _QUERY_S:
            self._asked_s, self._state = now_s, self._query(number)
        if self._state in _WAITING:
            self._waiting_s = now_s
            return f"Slurm has job {number} in the queue again ({self._state}), and the run goes on when it starts"
        if self._state == "RUNNING" and self._waiting_s is not None and now_s - self._waiting_s < _START_S:
            return f"Slurm has started job {number} again, and the run is about to go on"
        return ""


def query_job_state(number: str) -> str:
    """Return the state of a Slurm job in the queue, such as PENDING; "" if it is in the queue no more, or if squeue
    cannot tell.
    """
    with suppress(OSError, subprocess.SubprocessError):
        command = ["squeue", "--noheader", f"--jobs={number}", "--format=%T"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        return result.stdout.strip().partition("\n")[0]
    return ""
