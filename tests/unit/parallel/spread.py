"""Three steps of a tiny model on any layout, told as numbers that a test can put together and compare.

Every rank tells the blocks it owns, by the product's own table, and its tests compare them with one process.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from lmtrain.batch import IGNORED, Batch, StepBatches
from lmtrain.layout import Layout
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import (
    Bf16Settings,
    ComputeSettings,
    Fp16Settings,
    Fp32Settings,
    PrecisionSettings,
)
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step

CPU = torch.device("cpu")
# because: no size is a multiple of 4 x 2, so that shards and the vocabulary need padding and some are empty
SETTINGS = GPTSettings(
    num_layers=2, width=12, num_heads=4, num_kv_heads=2, vocab_size=13, vocab_multiple=1, seq_len=8, ffn_width=14,
    activation="silu", gated=True,
)  # fmt: skip
PRECISIONS: dict[str, PrecisionSettings] = {
    "fp32": Fp32Settings(), "bf16": Bf16Settings(), "fp16": Fp16Settings(initial_scale=1024.0),
}  # fmt: skip
NUM_SAMPLES = 16
# because: a large eps keeps the noise of gradients near 0 from growing to whole steps
OPTIM = AdamWSettings(lr=1e-2, eps=1e-4)


def build(
    parallel: dict[str, Any], precision: str | PrecisionSettings = "fp32", *, seed: int | None = 1, **model: Any
) -> ParallelModel:
    settings = ParallelSettings(**parallel)
    kind = PRECISIONS[precision] if isinstance(precision, str) else precision
    return build_parallel(
        replace(SETTINGS, **model), kind, ComputeSettings(), CPU,
        seed=seed, training=True, mesh=build_mesh(settings.layout, CPU, 60.0), parallel=settings,
    )  # fmt: skip


def step_of(step: int, layout: Layout, num_microbatches: int, dp_index: int) -> StepBatches:
    """A dp rank's share of the same samples as every layout has; valid labels are spread unevenly."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(13, (NUM_SAMPLES, 8), generator=generator)
    labels = torch.randint(13, (NUM_SAMPLES, 8), generator=generator)
    labels[0, 2:] = IGNORED
    labels[5] = IGNORED
    share = (num_microbatches, layout.dp, -1, 8)
    mine = zip(tokens.view(share)[:, dp_index], labels.view(share)[:, dp_index], strict=True)
    batches = [Batch(tokens_BT, labels_BT) for tokens_BT, labels_BT in mine]
    count = int((labels != IGNORED).sum())
    return StepBatches(step, batches, NUM_SAMPLES, (count,), np.arange(NUM_SAMPLES), labels.numel())


def train(
    parallel: dict[str, Any], precision: str, num_microbatches: int, model: dict[str, Any], overflow_rank: int = -1
) -> dict[str, Any]:
    """Three AdamW steps and the gradient of the first; in it one rank's activations can have an infinite gradient."""
    built = build(parallel, precision, **model)
    optimizer = build_optimizer(OPTIM, built)
    rank = dist.get_rank() if dist.is_initialized() else 0
    results = []
    gradients: dict[str, Any] = {}

    def keep_first(*_: Any) -> None:
        gradients.update(gradients or told(built, {n: p.grad for n, p in built.parameters.items()}))

    optimizer.register_step_pre_hook(keep_first)
    for step in range(3):
        spoilt = None
        if (rank, step) == (overflow_rank, 0):
            block = next(block for stage in built.stages.values() for block in stage.blocks.values())
            spoilt = block.get_submodule("mlp").register_full_backward_hook(to_infinity)
        batches = step_of(step, built.mesh.layout, num_microbatches, built.mesh.dp.index)
        results.append(train_step(built, optimizer, batches, 1e-2, 0.5))
        if spoilt is not None:
            spoilt.remove()
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "skipped": [result.skipped for result in results],
        "gradients": gradients,
        "weights": told(built, built.parameters),
        "scale": built.loss_scale.value,
    }


def to_infinity(module: nn.Module, above: Any, below: Any) -> Any:
    return tuple(torch.full_like(gradient, math.inf) for gradient in above)


def told(built: ParallelModel, tensors: dict[str, Any]) -> dict[str, Any]:
    """The blocks that this rank saves: name -> whole shape, and where each block stands in it."""
    result: dict[str, Any] = {}
    for piece in built.owned_pieces(built.pieces_of(tensors, "told")):
        entry = result.setdefault(piece.name.removeprefix("told."), {"shape": piece.global_shape, "blocks": []})
        entry["blocks"].append((piece.offset, piece.block.tolist()))
    return result


def together(ranks: list[dict[str, Any]]) -> dict[str, NDArray[np.float64]]:
    """Whole tensors from what every rank told; fails where a number is told twice or never."""
    wholes: dict[str, NDArray[np.float64]] = {}
    for told in ranks:
        for name, entry in told.items():
            whole = wholes.setdefault(name, np.full(entry["shape"], np.nan))
            for offset, values in entry["blocks"]:
                block = np.array(values)
                part = whole[tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))]
                assert np.isnan(part).all(), f"{name} at {offset} is owned twice"
                part[...] = block
    assert not any(np.isnan(whole).any() for whole in wholes.values())
    return wholes
