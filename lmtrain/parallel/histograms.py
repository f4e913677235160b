"""Histograms of whole weights and of their gradients, at any layout: each rank counts what it owns, the sum is all.

Called by training every so many steps, on every rank. Reads and changes nothing; it waits for the device, and so costs
about as much as a step of the optimizer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.models.model_settings import true_weights
from lmtrain.observe.measure.histogram import EDGES, Histogram
from lmtrain.parallel.collectives import all_reduce
from lmtrain.parallel.model import ParallelModel

_AT_ONCE = 1 << 22  # numbers; because: their buckets take as much memory again
WEIGHTS, GRADIENTS = "weights", "gradients"


@torch.no_grad()
def histograms(model: ParallelModel) -> dict[str, Histogram]:
    """`weights/NAME` as the update has left them, `gradients/NAME` as it has used them: summed, and clipped.

    Counts are the same at every layout. What has no finite number is left out.
    """
    names = [f"{what}/{name}" for what in (WEIGHTS, GRADIENTS) for name in true_weights(model.settings)]
    row_of, device = {name: row for row, name in enumerate(names)}, model.device
    edges = torch.tensor(EDGES, device=device)
    counts = torch.zeros(len(names), len(EDGES) + 1, dtype=torch.int64, device=device)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    ends = torch.full((len(names), 2), -torch.inf, dtype=torch.float64, device=device)  # of -x and of x
    gradients = {name: p.grad for name, p in model.parameters.items() if p.grad is not None}
    clipped = None if model.one_pass is None else model.one_pass.factor  # by what the update has multiplied them
    for what, tensors, factor in ((WEIGHTS, model.parameters, None), (GRADIENTS, gradients, clipped)):
        for piece in model.owned(model.place(tensors, what)):
            row = row_of[piece.name.replace(".", "/", 1)]
            for some in piece.block.flatten().split(_AT_ONCE):
                numbers = some if factor is None else some * factor
                _count(numbers[numbers.isfinite()].float(), edges, counts[row], sums[row], ends[row])
    for tensor, op in ((counts, dist.ReduceOp.SUM), (sums, dist.ReduceOp.SUM), (ends, dist.ReduceOp.MAX)):
        # collective: what each rank has counted of the numbers that it owns, over the world
        all_reduce(tensor, model.mesh.world, op, what="histograms")
    found = zip(names, counts.tolist(), sums.tolist(), ends.tolist(), strict=True)  # sync: they are read once
    return {
        name: Histogram(-below, above, total, squares, row)
        for name, row, (total, squares), (below, above) in found
        if any(row)
    }


def _count(numbers: Tensor, edges: Tensor, counts: Tensor, sums: Tensor, ends: Tensor) -> None:
    if not numbers.numel():
        return
    buckets = torch.bucketize(numbers, edges, out_int32=True)
    counts += torch.bincount(buckets, minlength=len(counts))
    wide = numbers.double()
    sums += torch.stack([wide.sum(), wide.square().sum()])
    ends.copy_(torch.maximum(ends, torch.stack([-wide.min(), wide.max()])))
