"""Does a step take as long as the planner says? Every schedule on 4 local processes, with and without sharding.

    python -m tests.benchmarks.plan_executor

Blocks, links between stages and FSDP's collectives take known times, asleep, so that 4 processes fit on 2 cores; all
else is what a run does. Layouts take turns, round by round, and medians are compared with the replayed table. One that
is off by more than 5% makes the exit code 1. The last column is the same step with nothing asleep: the host's own work,
which no prediction has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as Sheet
from torch import Tensor, nn

from lmtrain.batch import Batch, StepBatches
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.layers.block import BlockContext
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.linear_forward_backward_products import compute_or_defer
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.pipeline import stage_to_stage_messages
from lmtrain.parallel.weights import fsdp_sharding
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.plan.run_estimates.simulate_pipeline import OperationSeconds, replay_step
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from tests.layouts.bugs import replaced
from tests.layouts.workers import Pool

PROCESSES, ROUNDS, MOST_APART, SEQ_LEN = 4, 5, 0.05, 8
SECONDS = OperationSeconds(forward=0.160, input=0.192, weight=0.128, send=0.050, gather=0.060, reduce=0.100)
AT_ONCE = OperationSeconds(forward=0.0, input=0.0, weight=0.0)
SCHEDULES: tuple[tuple[str, int], ...] = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2))
CPU = torch.device("cpu")


def layouts() -> Iterator[dict[str, Any]]:
    """Five schedules over four ranks, and over two whose stages are shared by two, at every level that they allow."""
    for schedule, vp in SCHEDULES:
        yield {"schedule": schedule, "vp": vp, "pp": PROCESSES}
        for zero in (1, 2) if schedule.startswith("zb") else (1, 2, 3):
            yield {"schedule": schedule, "vp": vp, "pp": 2, "dp_shard": 2, "zero": zero}
    for zero in (1, 2, 3):
        yield {"dp_shard": PROCESSES, "zero": zero}


def planned(layout: dict[str, Any]) -> PlannedRun:
    """Stages of unequal length: a layer more than stages, or, without any, three."""
    parallel = ParallelSettings(**layout)
    stages = parallel.pp * parallel.vp
    num_layers = stages + 1 if stages > 1 else 3
    model = GPTSettings(
        num_layers=num_layers, width=8, num_heads=1, vocab_size=16, vocab_multiple=1, seq_len=SEQ_LEN, tied=False
    )
    count = 2 * parallel.pp if parallel.pp > 1 else 3
    return PlannedRun(
        model=model, parallel=parallel, precision=Fp32Settings(), compute=ComputeSettings(device="cpu"),
        optim=AdamWSettings(lr=1e-3), micro_batch=1, global_batch=count * parallel.layout.dp,
    )  # fmt: skip


def main() -> int:
    console, sheet = Console(), Sheet(title=f"{PROCESSES} processes, torch {torch.__version__}, {ROUNDS} rounds")
    for head in ("schedule", "pp", "vp", "dp", "zero", "predicted", "measured", "ratio", "at once"):
        sheet.add_column(head, justify="left" if head == "schedule" else "right")
    every, found = list(layouts()), dict[int, list[tuple[float, float]]]()
    with Pool() as pool:
        for _ in range(ROUNDS):
            for number, layout in enumerate(every):
                ranks = pool.run("tests.benchmarks.plan_executor:measure", PROCESSES, {"layout": layout})
                found.setdefault(number, []).append((max(r[0] for r in ranks), max(r[1] for r in ranks)))
    off = 0
    for number, layout in enumerate(every):
        run = planned(layout)
        predicted = replay_step(run, SECONDS).makespan
        measured, at_once = (median(column) for column in zip(*found[number], strict=True))
        off += abs(predicted / measured - 1) > MOST_APART
        p = run.parallel
        sheet.add_row(
            p.schedule if p.pp > 1 else "-", str(p.pp), str(p.vp), str(p.dp_shard),
            str(p.zero) if p.dp_shard > 1 else "-",
            f"{predicted * 1e3:.0f} ms", f"{measured * 1e3:.0f} ms", f"{predicted / measured:.3f}",
            f"{at_once * 1e3:.0f} ms",
        )  # fmt: skip
    console.print(sheet)
    return int(off > 0)


def measure(layout: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a step on this rank, from a barrier on, and of one in which nothing sleeps: the host's own work."""
    run = planned(layout)
    model = build_parallel(
        run.model, run.precision, run.compute, CPU, seed=1, training=True,
        mesh=build_mesh(run.parallel.layout, CPU, 60.0), parallel=run.parallel,
    )  # fmt: skip
    tokens, count = torch.arange(SEQ_LEN).view(1, SEQ_LEN), run.num_microbatches
    batches = StepBatches(
        0, [Batch(tokens, tokens)] * count, count, (SEQ_LEN * count,), np.arange(count), SEQ_LEN * count
    )
    took = []
    for seconds in (AT_ONCE, AT_ONCE, SECONDS):  # the first begins much for the first time
        for stage in model.stages.values():
            for block in stage.blocks.values():
                block.forward = Slow(block, seconds)
        with slow_links(seconds):
            dist.barrier()
            began = time.perf_counter()
            model.forward_backward(batches)
            took.append(time.perf_counter() - began)
            model.masters.publish()
    return took[2], took[1]


@contextmanager
def slow_links(seconds: OperationSeconds) -> Iterator[None]:
    """A message arrives a while after it was sent, in order; a collective of FSDP's takes a while longer."""
    with ThreadPoolExecutor(1) as lane, ExitStack() as stack:

        def send(
            self: stage_to_stage_messages.Outbox, needed: int, tensor: Tensor, tag: int, letter: Any = None
        ) -> None:
            ready = time.perf_counter() + (0.0 if tag else seconds.send)
            late: Any = Late(lane.submit(_send_at, ready, self, tensor, tag))
            self.in_flight.append((needed, late, tensor))

        stack.enter_context(replaced(stage_to_stage_messages.Outbox, "_send", send))
        for owner, each in ((fsdp_sharding._AllGather, seconds.gather), (fsdp_sharding._ReduceScatter, seconds.reduce)):
            stack.enter_context(replaced(owner, "__call__", _later(owner.__call__, each)))
        yield


class Late:
    """A send that has not begun yet, to those who wait for it."""

    def __init__(self, begun: Future[dist.Work]) -> None:
        self.begun = begun

    def wait(self) -> None:
        self.begun.result().wait()

    def is_completed(self) -> bool:
        return self.begun.done() and self.begun.result().is_completed()


def _send_at(ready: float, box: stage_to_stage_messages.Outbox, tensor: Tensor, tag: int) -> dist.Work:
    time.sleep(max(ready - time.perf_counter(), 0.0))
    work = dist.isend(tensor, box.receiver, group=box.group, tag=tag)
    assert work is not None
    return work


def _later(right: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return right(*args, **options)

    return call


class Slow:
    """A block's forward: it only takes its time. The gradient that it gives one of its weights is 0."""

    def __init__(self, block: nn.Module, seconds: OperationSeconds) -> None:
        self.block = block
        self.seconds = seconds

    def __call__(self, x_BTD: Tensor, around: BlockContext) -> Tensor:
        y: Tensor = _Pause.apply(x_BTD, next(self.block.parameters()), self.seconds)  # type: ignore[no-untyped-call]
        return y


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: OperationSeconds) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, seconds = ctx.weight, ctx.seconds

        def product() -> Tensor:
            time.sleep(seconds.weight)
            return torch.zeros_like(weight)

        time.sleep(seconds.input)
        return grads[0], compute_or_defer(weight, product), None


if __name__ == "__main__":
    raise SystemExit(main())
