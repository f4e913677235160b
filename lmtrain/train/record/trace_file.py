"""Opens the trace of a run: a file for each process and start, in the run's folder, once a step is to be traced.

Called by the loop. Knows what stands in the header; when and what is recorded, observe/spans decides.
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

from lmtrain.observe.measure import phases
from lmtrain.observe.spans.device import DeviceClock
from lmtrain.observe.spans.format import Header, file_name
from lmtrain.observe.spans.recorder import Recorder
from lmtrain.observe.spans.span_file import SpanFile
from lmtrain.observe.spans.tracer import ALL, Tracer
from lmtrain.parallel.collectives import all_reduce
from lmtrain.train.run import Run

TRACE_FOLDER = "trace"
_FILE = re.compile(r"rank-\d{5,}(?:\.(\d{1,9}))?\.spans")
_CAPACITY = {ALL: 1 << 17}  # records; of 48 bytes
_FEW_STEPS = 1 << 15


@contextmanager
def traced(run: Run) -> Iterator[Tracer]:
    """Around the steps of a run, on every process of it."""
    which, mesh = run.config.observe.trace, run.mesh
    start = torch.tensor(next_start(run.folder / TRACE_FOLDER) if mesh.rank == 0 else 0, device=run.model.device)
    # collective: what rank 0 has found, to the world
    number = int(all_reduce(start, mesh.world, dist.ReduceOp.MAX, "the number of a start"))

    def open_recorder() -> Recorder:
        file = SpanFile(run.folder / TRACE_FOLDER / file_name(mesh.rank, number), _header(run, number))
        return Recorder(file, DeviceClock(torch.cuda) if run.model.device.type == "cuda" else None)

    tracer = Tracer(which, open_recorder, run.view.note)
    phases.tell_steps(tracer.begin_step)
    try:
        yield tracer
    finally:
        tracer.close()


def next_start(folder: Path) -> int:
    """The first number that no file in it has."""
    names = os.listdir(folder) if folder.is_dir() else []
    return max((int(found[1] or 0) + 1 for name in names if (found := _FILE.fullmatch(name))), default=0)


def _header(run: Run, start: int) -> Header:
    config, layout, at = run.config, run.mesh.layout, run.mesh.coordinate
    return Header(
        rank=run.mesh.rank,
        world_size=layout.world_size,
        coordinate=(at.pp, at.dp_replicate, at.dp_shard, at.tp),
        sizes=(layout.pp, layout.vp, layout.dp_replicate, layout.dp_shard, layout.tp),
        host=socket.gethostname(),
        pid=os.getpid(),
        start=start,
        wall_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        capacity=_CAPACITY.get(config.observe.trace, _FEW_STEPS),
        schedule=config.parallel.schedule,
        num_microbatches=config.train.global_batch // (config.train.micro_batch * layout.dp),
    )
