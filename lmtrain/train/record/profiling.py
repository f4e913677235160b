"""A window of steps under torch's profiler: a trace for people, a table of kernels for the report.

Called by the loop with the steps that it is about to take. A rank that is not profiled gets them back as they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from lmtrain.data.loader import StepBatches
from lmtrain.observe.profile.kernels import ENDING, read_trace, table_of, write_table
from lmtrain.train.run import Run
from lmtrain.units import format_bytes

FOLDER = "profile"  # in the run's


def profiled(run: Run, steps: Iterator[StepBatches]) -> Iterator[StepBatches]:
    """The same steps. Between the first and the last of observe.profile_steps, what this rank does is recorded."""
    observe = run.config.observe
    if observe.profile_steps is None or run.mesh.rank not in (observe.profile_ranks or (0,)):
        return steps
    return _profiled(run, steps, *observe.profile_steps)


def _profiled(run: Run, steps: Iterator[StepBatches], first: int, last: int) -> Iterator[StepBatches]:
    """A step is recorded from the wait for its data until the next one's: with what is measured and saved after it."""
    window = None
    try:
        while True:
            if window is None and first <= run.progress.step + 1 <= last:
                window = Window(run)
            elif window is not None and run.progress.step >= last:
                window.close()
                window, first = None, last + 1
            batches = next(steps, None)
            if batches is None:
                return
            yield batches
    finally:
        if window is not None:
            window.close()


class Window:
    """From the step that is about to begin until it is closed. That a profiler does not work never ends a run."""

    def __init__(self, run: Run) -> None:
        self._run, self._first, self._began_s = run, run.progress.step + 1, time.monotonic()
        on_gpu = [ProfilerActivity.CUDA] if run.model.device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        try:
            self._profile.start()
        except (RuntimeError, OSError) as error:
            run.view.note(f"warning: torch's profiler does not start: {error}")

    def close(self) -> None:
        last, seconds = self._run.progress.step, time.monotonic() - self._began_s
        try:
            self._profile.stop()
            if last >= self._first:
                self._write(last, seconds)
        except (RuntimeError, OSError, AssertionError, ValueError) as error:
            self._run.view.note(f"warning: the profile of steps {self._first} to {last} is lost: {error}")

    def _write(self, last: int, seconds: float) -> None:
        rank, folder = self._run.mesh.rank, self._run.folder / FOLDER
        folder.mkdir(exist_ok=True)
        name = f"steps-{self._first:08}-{last:08}.rank-{rank:05}"
        trace, partial = folder / f"{name}.json.gz", folder / f".{name}.json.gz"
        self._profile.export_chrome_trace(str(partial))
        os.replace(partial, trace)
        table = table_of(read_trace(trace), (self._first, last), rank, seconds)
        write_table(folder / f"{name}{ENDING}", table)
        self._run.view.note("\n".join([*table.lines(), f"  {_said(trace)}"]))


def _said(trace: Path) -> str:
    return f"{trace} ({format_bytes(trace.stat().st_size)}) opens in https://ui.perfetto.dev"
