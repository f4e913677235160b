"""Four small stages through our executor and torch's schedules: what a worker does for test_pipeline_twin.py."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from lmtrain.layout import Layout
from lmtrain.parallel.linear_forward_backward_products import apply_summing_linears
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.pipeline.execute_schedule import Pipeline, TrainingObserver
from lmtrain.parallel.weights.master_weights import MasterWeights
from lmtrain.schedules.pipeline_schedule import schedule_named

CPU = torch.device("cpu")
STAGES, ROWS, LENGTH, WIDTH = 4, 2, 3, 6
TWINS: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble, "zb_v": ScheduleZBVZeroBubble,
}  # fmt: skip
Stages = dict[int, nn.Module]
Losses = list[float]  # by microbatch, on the rank of the last stage


def both(schedule: str, vp: int, count: int) -> dict[str, Any]:
    """Losses of either on this rank, and by parameter how far our gradient is from torch's, relative to its norm."""
    layout = Layout(pp=STAGES // vp, vp=vp)
    torch.manual_seed(0)
    # because: torch's halves of a backward fail where a stage's output is a view, as that of a linear of 3 dims is
    whole = [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
        for _ in range(STAGES)
    ]
    x, y = (torch.randn(count * ROWS, LENGTH, WIDTH) for _ in range(2))
    owners = schedule_named(schedule).ranks_of_stages(layout.pp, vp)
    mine: Stages = {n: stage for n, stage in enumerate(whole) if owners[n] == dist.get_rank()}
    theirs = deepcopy(mine)
    losses = {"ours": run_ours(schedule, layout, mine, x.chunk(count), y.chunk(count))}
    losses["torch's"] = run_torchs(schedule, theirs, x, y, count)
    return losses | {"apart": {
        f"{n}.{name}": relative(mine[n].get_parameter(name).grad, parameter.grad)
        for n, stage in theirs.items() for name, parameter in stage.named_parameters()
    }}  # fmt: skip


def run_ours(schedule: str, layout: Layout, stages: Stages, xs: tuple[Tensor, ...], ys: tuple[Tensor, ...]) -> Losses:
    if schedule_named(schedule).splits_backward:
        for stage in stages.values():
            apply_summing_linears(stage)

    def compute(stage: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        out: Tensor = stages[stage](xs[microbatch] if hidden is None else hidden)
        return out if stage < STAGES - 1 else F.mse_loss(out, ys[microbatch])[None]

    mesh = build_mesh(layout, CPU, 60.0)
    pipeline = Pipeline(schedule_named(schedule), mesh, torch.float32, CPU, split_over_tp=False)
    observer = TrainingObserver(MasterWeights({}, torch.float32), len(xs))
    shares = pipeline.train(len(xs), compute, (ROWS, LENGTH, WIDTH), 1.0, observer)
    pipeline.wait_for_sends()
    return [shares[index].item() for index in sorted(shares)]


class Part(PipelineStage):
    """because: torch 2.11 begins with messages to all neighbours; in a V a rank is its own, which gloo cannot reach"""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


def run_torchs(schedule: str, stages: Stages, x: Tensor, y: Tensor, count: int) -> Losses:
    parts = [Part(stage, n, STAGES, CPU) for n, stage in stages.items()]
    single = schedule in ("gpipe", "1f1b")
    twin = TWINS[schedule](parts[0] if single else parts, count, F.mse_loss, scale_grads=False)
    losses: list[Tensor] = []
    twin.step(*([x] if 0 in stages else []), **({"target": y, "losses": losses} if STAGES - 1 in stages else {}))
    return [loss.item() for loss in losses]


def relative(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None
    assert theirs is not None
    norm = float(theirs.norm())
    assert norm > 0
    return float((ours - theirs).norm()) / norm
