"""The trace of a run: a file per process and start in the run's folder, opened once a step is to be traced.

Called by the loop. This module fills the file's header; observe/spans decides when to record and what.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lmtrain.batch import StepBatches
from lmtrain.observe.profile.kernel_times import TABLE_SUFFIX, build_table, read_trace, write_table
from lmtrain.observe.spans.span_file import Header, SpanFile, span_file_name
from lmtrain.observe.spans.trace_span_recorder import TRACE_ALL, DeviceClock, Recorder, Tracer
from lmtrain.parallel.tp_linears_and_collectives import all_reduce
from lmtrain.runfolder.file_names import TRACES
from lmtrain.runtime.processes import current_phase
from lmtrain.train.run_objects_and_resume import Run
from lmtrain.units import format_bytes

PROFILE_FOLDER = "profile"  # within the run's folder
_FILE = re.compile(r"rank-\d{5,}(?:\.(\d{1,9}))?\.spans")
_CAPACITY, _SAMPLED_CAPACITY = 1 << 17, 1 << 15  # records, of 48 bytes each, of all steps and of some


@contextmanager
def open_tracer(run: Run) -> Iterator[Tracer]:
    """Yield a Tracer that writes the trace file of this rank while the `with` block trains. All ranks take part: rank 0
    shares the number of this start of the run, which is in the file's name.
    """
    trace_mode, mesh = run.config.observe.trace, run.mesh
    start = torch.tensor(next_start_number(run.folder / TRACES) if mesh.rank == 0 else 0, device=run.model.device)
    # collective: rank 0's number, to the world
    number = int(all_reduce(start, mesh.world, dist.ReduceOp.MAX, "the number of a start"))

    def open_recorder() -> Recorder:
        file = SpanFile(run.folder / TRACES / span_file_name(mesh.rank, number), _header(run, number))
        return Recorder(file, DeviceClock(torch.cuda) if run.model.device.type == "cuda" else None)

    tracer = Tracer(trace_mode, open_recorder, run.view.show_note)
    current_phase.set_step_callback(tracer.begin_step)
    try:
        yield tracer
    finally:
        tracer.close()


def next_start_number(folder: Path) -> int:
    """Return one more than the highest start number in the names of the trace files in `folder`, or 0 if there are
    none.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    return max((int(match[1] or 0) + 1 for name in names if (match := _FILE.fullmatch(name))), default=0)


def _header(run: Run, start_number: int) -> Header:
    """Return the header of this rank's trace file. `start_number` counts the starts of the run that wrote traces, from
    0.
    """
    config, layout, at = run.config, run.mesh.layout, run.mesh.coordinate
    return Header(
        rank=run.mesh.rank,
        world_size=layout.world_size,
        coordinate=(at.pp, at.dp_replicate, at.dp_shard, at.tp),
        sizes=(layout.pp, layout.vp, layout.dp_replicate, layout.dp_shard, layout.tp),
        host=socket.gethostname(),
        pid=os.getpid(),
        start=start_number,
        wall_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        capacity=_CAPACITY if config.observe.trace == TRACE_ALL else _SAMPLED_CAPACITY,
        schedule=config.parallel.schedule,
        num_microbatches=config.train.global_batch // (config.train.micro_batch * layout.dp),
    )


def profile_steps(run: Run, steps: Iterator[StepBatches]) -> Iterator[StepBatches]:
    """Yield the same batches as `steps`, and meanwhile record a torch profile of this rank from the first to the last
    step in observe.profile_steps, if observe.profile_ranks has this rank.

    The profile of a step begins with the wait for its data and ends when the wait for the next step's data begins, so
    that it includes measurements and saves after the step.
    """
    observe = run.config.observe
    if observe.profile_steps is None or run.mesh.rank not in (observe.profile_ranks or (0,)):
        yield from steps
        return
    first, last = observe.profile_steps
    window = None
    try:
        while True:
            if window is None and first <= run.progress.step + 1 <= last:
                window = ProfileWindow(run)
            elif window is not None and run.progress.step >= last:
                window.close()
                window, first = None, last + 1
            if (batches := next(steps, None)) is None:
                return
            yield batches
    finally:
        if window is not None:
            window.close()


class ProfileWindow:
    """A torch profile from the next step until `close`, which writes it. A failing profiler causes a warning and never
    ends a run.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._first, self._began_s = run, run.progress.step + 1, time.monotonic()
        on_gpu = [ProfilerActivity.CUDA] if run.model.device.type == "cuda" else []
        # because: without `acc_events`, torch 2.11 warns about a next cycle, and there is only one
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)
        try:
            self._profile.start()
        except (RuntimeError, OSError) as error:
            run.view.show_note(f"warning: torch's profiler does not start: {error}")

    def close(self) -> None:
        last, seconds = self._run.progress.step, time.monotonic() - self._began_s
        try:
            self._profile.stop()
            if last >= self._first:
                self._write(last, seconds)
        except (RuntimeError, OSError, AssertionError, ValueError) as error:
            self._run.view.show_note(f"warning: the profile of steps {self._first} to {last} is lost: {error}")

    def _write(self, last_step: int, seconds: float) -> None:
        """Write the profile as a Chrome trace and as a table of kernels, and show the table. `last_step` is the last
        profiled step, `seconds` the wall time from the begin to the end of the profile.
        """
        rank, folder = self._run.mesh.rank, self._run.folder / PROFILE_FOLDER
        folder.mkdir(exist_ok=True)
        name = f"steps-{self._first:08}-{last_step:08}.rank-{rank:05}"
        trace, partial = folder / f"{name}.json.gz", folder / f".{name}.json.gz"
        self._profile.export_chrome_trace(str(partial))
        os.replace(partial, trace)
        table = build_table(read_trace(trace), (self._first, last_step), rank, seconds)
        write_table(folder / f"{name}{TABLE_SUFFIX}", table)
        note = f"  {trace} ({format_bytes(trace.stat().st_size)}) opens in https://ui.perfetto.dev"
        self._run.view.show_note("\n".join([*table.lines(), note]))
