"""What a worker does for a case: build, train a few real steps, and give losses, norms and the first gradient.

Called on each rank through the pool. A gradient leaves as files of Pieces, so that what is compared is the whole that
a checkpoint would make of it.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from lmtrain.kernels import triton_availability
from lmtrain.layout import Piece
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.parallel import linear_forward_backward_products
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.flex_on_cpu import block_masks_everywhere
from tests.layouts.bugs import planted, replaced
from tests.layouts.cases import GLOBAL_BATCH, Case
from tests.layouts.toy_data import loader_of
from tests.layouts.workers import DEVICE

OPTIM = AdamWSettings(lr=1e-3, clip_norm=0.2)  # because: every first norm is above 0.2, so that clipping is compared
SEED = 7


def device() -> torch.device:
    """What this worker computes on."""
    return torch.device(os.environ.get(DEVICE, "cpu"))


def build(case: Case) -> ParallelModel:
    mesh = build_mesh(case.parallel.layout, device(), timeout_s=180.0) if case.num_processes > 1 else None
    with replaced(linear_forward_backward_products, "SUMMING_DEVICES", {device().type} if case.summed else set()):
        return build_parallel(
            case.model_settings, case.precision_settings, case.compute, device(), seed=SEED, training=True,
            mesh=mesh, parallel=case.parallel, recompute=case.recompute_settings,
        )  # fmt: skip


def dp_index(case: Case) -> int:
    return case.parallel.layout.dp_index(dist.get_rank()) if dist.is_initialized() else 0


def train(name: str, folder: str, steps: int, optim: OptimSettings = OPTIM, bug: str | None = None) -> dict[str, Any]:
    """Losses, norms and skips of each step; the gradient of the first, clipped and without a loss scale, as pieces."""
    case = Case.named(name)
    with (
        planted(bug) if bug else nullcontext(),
        replaced(triton_availability, "FUSED_DEVICES", {device().type} if case.summed else set()),
        block_masks_everywhere() if case.blocks else nullcontext(),
    ):
        model = build(case)
        optimizer = build_optimizer(optim, model)
        loader = loader_of(case, dp_index(case))
        first: dict[str, Tensor] = {}

        def keep_first(*_: Any) -> None:
            if not first:
                factor = model.one_pass_optimizer.gradient_factor if model.one_pass_optimizer else None
                given = {n: p.grad for n, p in model.parameters.items() if p.grad is not None}
                first.update({n: grad.clone() if factor is None else grad * factor for n, grad in given.items()})

        optimizer.register_step_pre_hook(keep_first)
        done, held_bytes = [], []
        for step in range(steps):
            done.append(train_step(model, optimizer, loader.read(step), optim.lr, optim.clip_norm))
            held_bytes.append(torch.cuda.memory_allocated())  # 0 without a GPU
    return {
        "losses": [result.loss for result in done],
        "norms": [result.grad_norm for result in done],
        "skipped": [result.skipped for result in done],
        "held_bytes": held_bytes,
        "pieces": write_pieces(model.pieces_of(first, "grad"), Path(folder)),
    }


def sample_losses(name: str) -> list[float]:
    """What each sample adds to the first step's loss."""
    case = replace(Case.named(name), microbatches=GLOBAL_BATCH)
    step = loader_of(case, 0).read(0)
    counts = torch.tensor(step.counts, device=device())
    shares: list[float] = [float((sums[0] / counts).sum()) for sums in build(case).validation_sums(step.microbatches)]
    return shares


def write_pieces(pieces: list[Piece], folder: Path) -> list[dict[str, Any]]:
    """Blocks to a file of this rank; gives where each stands, for outcome.assemble."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    save_file({str(i): piece.block.contiguous() for i, piece in enumerate(pieces)}, folder / f"{rank}.safetensors")
    return [{"name": p.name, "global_shape": p.global_shape, "offset": p.offset} for p in pieces]
