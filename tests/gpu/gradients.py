"""A step's gradients three ways: exact, in fp64 on the CPU; by plain torch, without `parallel`; and a run's own.

All begin with the same weights and read the same batches. How far a run's own may be off is what plain eager torch is
off in the same precision on the same device, twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lmtrain.kernels import triton_availability
from lmtrain.layout import Coordinate
from lmtrain.models import block_stack
from lmtrain.models.layers import attention
from lmtrain.models.layers.rotary import Rotation
from lmtrain.models.objectives import causal_and_masked_objectives
from lmtrain.models.objectives.causal_and_masked_objectives import build_objective
from lmtrain.models.objectives.cross_entropy import cross_entropy_sum
from lmtrain.models.rotary_settings import RotarySettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings
from lmtrain.parallel.weights.master_weights import WORK_DTYPE
from lmtrain.placement.layers_and_shards_of_ranks import placements_of_rank
from tests.layouts.bugs import replaced
from tests.layouts.cases import Case
from tests.layouts.outcome import HALF, distance
from tests.layouts.toy_data import loader_of
from tests.layouts.training import SEED
from tests.unit.models.first_weights import start

CPU = torch.device("cpu")
SCALE = 1024.0  # of a loss in fp16, as cases have it
# of the norm of a gradient; because: two sums of the same fp32 numbers differ by as much, and a bias of few numbers may
# be right by accident
FLOOR = 1e-6
Gradients = dict[str, Tensor]


def exact(case: Case) -> Gradients:
    """All in fp64, the angles too; where rounding would be is nothing."""
    with _in_fp64(), replaced(triton_availability, "FUSED_DEVICES", set()):
        return _by_plain_torch(case, torch.float64, CPU)


def by_plain_torch(case: Case, device: torch.device) -> Gradients:
    """Eager, without recompute; a microbatch's gradients are in the precision of the case, their sum is exact.

    And without kernels of ours: a yardstick made of them would be off as far as what it measures.
    """
    with replaced(triton_availability, "FUSED_DEVICES", set()):
        return _by_plain_torch(case, WORK_DTYPE[case.precision], device)


def by_lmtrain(case: Case, device: torch.device, *, always_shard: bool = False) -> Gradients:
    model = build_parallel(
        case.model_settings, case.precision_settings, ComputeSettings(compile=case.compile), device, seed=SEED,
        training=True, parallel=case.parallel, recompute=case.recompute_settings, always_shard=always_shard,
    )  # fmt: skip
    model.forward_backward(loader_of(case, 0).read(0))
    whole: Gradients = {}
    for piece in model.pieces_of({n: p.grad for n, p in model.parameters.items() if p.grad is not None}, "grad"):
        name = piece.name.removeprefix("grad.")
        target = whole.setdefault(name, torch.full(piece.global_shape, math.nan, dtype=torch.float64))
        at = zip(piece.offset, piece.block.shape, strict=True)
        target[tuple(slice(o, o + n) for o, n in at)] = piece.block.cpu().double() / model.loss_scale.value
    return whole


def _by_plain_torch(case: Case, dtype: torch.dtype, device: torch.device) -> Gradients:
    model: Any = case.model_settings.build()
    start(model, SEED)
    model.to(device=device, dtype=dtype).train()
    parameters = dict(model.named_parameters())
    objective, batches = build_objective(model.settings.terms), loader_of(case, 0).read(0)
    scale = SCALE if case.precision == "fp16" else 1.0
    total: Gradients = {}
    for arrays in batches.microbatches:
        batch = arrays.map(lambda array: torch.as_tensor(array).to(device))
        sums = objective.loss_sums(model, model(batch), batch)
        counts = torch.tensor(batches.counts, dtype=sums.dtype, device=device)
        gradients = torch.autograd.grad((sums / counts).sum() * scale, list(parameters.values()))
        for name, gradient in zip(parameters, gradients, strict=True):
            total[name] = total.get(name, torch.zeros(())) + gradient.cpu().double() / scale
    places = placements_of_rank(model.settings, case.parallel, Coordinate(0, 0, 0, 0))
    return {name: gradient[: places[name].global_shape[0]] for name, gradient in total.items()}


@contextmanager
def _in_fp64() -> Iterator[None]:
    """What the house does in fp32 whatever comes is done in fp64."""

    def angles(positions: Tensor, head_width: int, settings: RotarySettings, **_: Any) -> Rotation:
        pairs = torch.arange(0, head_width, 2, dtype=torch.float64)
        turned = positions.double()[..., None, None] / settings.rotary_base ** (pairs / head_width)
        return Rotation(turned.cos(), turned.sin())

    def rotated(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
        left, right = x_BTHK.chunk(2, dim=-1)
        cos, sin = rotation
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    with ExitStack() as patches:
        for owner, name, value in (
            (block_stack, "build_rotation", angles), (attention, "rotate", rotated),
            (causal_and_masked_objectives, "cross_entropy_plain", cross_entropy_sum),
        ):  # fmt: skip
            patches.enter_context(replaced(owner, name, value))
        yield


@dataclass
class Limits:
    """What is compared with, worked out once for all cases that share it."""

    known: dict[Any, Gradients] = field(default_factory=dict)

    def exact(self, case: Case) -> Gradients:
        key = (case.model, case.global_batch)
        if key not in self.known:
            self.known[key] = exact(case)
        return self.known[key]

    def plain(self, case: Case, device: torch.device) -> Gradients:
        key = (case.model, case.precision, case.microbatches, device)
        if key not in self.known:
            self.known[key] = by_plain_torch(case, device)
        return self.known[key]

    def wrong(self, case: Case, device: torch.device, found: Gradients) -> list[str]:
        """Of each gradient that is further off than it may be: how far, and what is allowed."""
        right, plain = self.exact(case), self.plain(case, device)
        if found.keys() != right.keys():
            return [f"gradients of {sorted(found.keys() ^ right.keys())} on one side only"]
        off, own = ({n: distance(case, n, g[n], right[n]) for n in right} for g in (found, plain))
        usual = median(own.values())
        limits = {name: max(HALF * own[name], HALF * usual, FLOOR) for name in right}
        return [
            f"{name}: off by {off[name]:.2e}, and {limits[name]:.2e} is allowed"
            for name in right
            if not off[name] <= limits[name]  # NaN is wrong too
        ]
