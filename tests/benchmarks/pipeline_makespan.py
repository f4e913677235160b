"""Does a pipeline take as long as its table says? Every schedule on 4 local processes, beside the simulator.

    python -m tests.benchmarks.pipeline_makespan

Blocks of a tiny GPT sleep a fixed time in each forward and in both halves of each backward, so that 4 processes fit on
2 cores. All else is what a run does: `forward_backward` with its messages, queues of second halves, embedding, head and
loss. A schedule whose median is off by more than 10% makes the exit code 1.
"""

from __future__ import annotations

import time
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
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.linear_forward_backward_products import compute_or_defer
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.schedule_simulator import Costs, simulate
from tests.layouts.workers import Pool

PROCESSES, REPEATS, MOST_APART = 4, 5, 0.10
COSTS = Costs(forward=0.030, input=0.036, weight=0.024)  # seconds, of every stage
SCHEDULES: tuple[tuple[str, int], ...] = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2))
MICROBATCHES = (PROCESSES, 2 * PROCESSES, 2 * PROCESSES + 1)
CPU = torch.device("cpu")


def main() -> int:
    console, sheet = Console(), Sheet(title=f"{PROCESSES} processes, torch {torch.__version__}")
    for head in ("schedule", "p", "v", "m", "simulated", "measured", "ratio", "bubble", "bubble measured"):
        sheet.add_column(head, justify="left" if head == "schedule" else "right")
    off = 0
    with Pool() as pool:
        for schedule, vp in SCHEDULES:
            for count in MICROBATCHES:
                timeline = simulate(schedule_named(schedule).table(PROCESSES, vp, count), COSTS)
                ranks = pool.run(
                    "tests.benchmarks.pipeline_makespan:measure", PROCESSES,
                    {"schedule": schedule, "vp": vp, "count": count},
                )  # fmt: skip
                found = median(max(times) for times in zip(*ranks, strict=True))
                ratio, work = found / timeline.makespan, timeline.busy[0]
                off += abs(ratio - 1) > MOST_APART
                sheet.add_row(
                    schedule, str(PROCESSES), str(vp), str(count), f"{timeline.makespan * 1e3:.0f} ms",
                    f"{found * 1e3:.0f} ms", f"{ratio:.3f}", f"{timeline.bubble:.1%}", f"{found / work - 1:.1%}",
                )  # fmt: skip
    console.print(sheet)
    return int(off > 0)


def measure(schedule: str, vp: int, count: int) -> list[float]:
    """Seconds of each repeated `forward_backward` on this rank, from a barrier on."""
    model, batches = build_model(schedule, vp), build_batches(count)
    for stage in model.stages.values():
        for key, block in stage.blocks.items():
            stage.blocks[key] = Slow(block)
    times = []
    for _ in range(1 + REPEATS):
        dist.barrier()
        began = time.perf_counter()
        model.forward_backward(batches)
        times.append(time.perf_counter() - began)
    return times[1:]


def build_model(schedule: str, vp: int) -> ParallelModel:
    """A layer a stage."""
    settings = GPTSettings(num_layers=PROCESSES * vp, width=8, num_heads=1, vocab_size=16, vocab_multiple=1, seq_len=8)
    parallel = ParallelSettings(pp=PROCESSES, vp=vp, schedule=schedule)
    return build_parallel(
        settings, Fp32Settings(), ComputeSettings(device="cpu"), CPU, seed=1, training=True,
        mesh=build_mesh(parallel.layout, CPU, 60.0), parallel=parallel,
    )  # fmt: skip


def build_batches(count: int) -> StepBatches:
    tokens = torch.arange(8).view(1, 8)
    return StepBatches(0, [Batch(tokens, tokens + 1)] * count, count, (8 * count,), np.arange(count), 8 * count)


class Slow(nn.Module):
    """In a block's place: it only takes its time."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.weight = next(block.parameters())  # any will do; what it gets is a gradient of 0

    def forward(self, x_BTD: Tensor, around: BlockContext) -> Tensor:
        y: Tensor = _Pause.apply(x_BTD, self.weight)  # type: ignore[no-untyped-call]
        return y


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        time.sleep(COSTS.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.weight

        def product() -> Tensor:
            time.sleep(COSTS.weight)
            return torch.zeros_like(weight)

        time.sleep(COSTS.input)
        return grads[0], compute_or_defer(weight, product)


if __name__ == "__main__":
    raise SystemExit(main())
