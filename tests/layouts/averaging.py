"""What a worker does for test_averages.py: train with an average of the weights, and compare it with a loop over them.

The loop is written out in numpy here. What differs is told in words, so that a test asserts that there is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtrain.checkpoint.weight_ema_settings import WeightAverageSettings
from lmtrain.kernels import triton_availability
from lmtrain.optim.lamb_settings import LAMBSettings
from lmtrain.optim.muon_settings import MuonSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.train.exponential_weight_average import WeightAverage
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.flex_on_cpu import block_masks_everywhere
from tests.layouts.bugs import replaced
from tests.layouts.cases import Case
from tests.layouts.toy_data import loader_of
from tests.layouts.training import OPTIM, build, device, dp_index

Numbers = dict[str, Any]  # of arrays
SETTINGS = WeightAverageSettings(decay=0.9)
STEPS = 3
OPTIMIZERS: dict[str, OptimSettings] = {
    "adamw": OPTIM, "lamb": LAMBSettings(lr=1e-2), "muon": MuonSettings(lr=1e-2)
}  # fmt: skip


def averaged(name: str, optimizer: str) -> dict[str, Any]:
    """Return the differences of the average from the loop's, what a measurement leaves behind, and the losses."""
    case, settings = Case.named(name), OPTIMIZERS[optimizer]
    with (
        replaced(triton_availability, "FUSED_DEVICES", {device().type} if case.summed else set()),
        block_masks_everywhere() if case.blocks else nullcontext(),
    ):
        model = build(case)
        updates = build_optimizer(settings, model)
        loader = loader_of(case, dp_index(case))
        average = WeightAverage(model.masters, SETTINGS)
        average.begin(0)
        expected = _numbers(model.parameters)
        for step in range(STEPS):
            train_step(model, updates, loader.read(step), settings.lr, settings.clip_norm)
            average.update(step + 1)
            expected = _one_more(expected, _numbers(model.parameters))
        wrong = _differences("average", _numbers(average.tensors), expected)
        before = [_numbers(model.parameters), _compute_weights(model)]
        loss = _loss(model, loader, case)
        with average.in_place_of_weights():
            loss_of_average = _loss(model, loader, case)
            wrong += _differences("weights in use", _numbers(model.parameters), expected)
        wrong += _differences("average afterwards", _numbers(average.tensors), expected)
        for was, now in zip(before, [_numbers(model.parameters), _compute_weights(model)], strict=True):
            wrong += _differences("weights afterwards", now, was)
        if (again := _loss(model, loader, case)) != loss:
            wrong.append(f"the loss afterwards is {again}, and was {loss}")
    num_bytes = sum(tensor.nbytes for tensor in average.tensors.values())
    return {"wrong": wrong, "loss": loss, "loss_of_average": loss_of_average, "bytes": num_bytes}


def _loss(model: ParallelModel, loader: Any, case: Case) -> float:
    """The summed loss of the labels of another step's samples, over all ranks."""
    sums = list(model.validation_sums(loader.read(STEPS).microbatches))
    return float(torch.stack(sums)[:, 0].sum())


def _numbers(tensors: Mapping[str, Tensor]) -> Numbers:
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}


def _compute_weights(model: ParallelModel) -> Numbers:
    """The weights that an unsharded rank computes with; those of a sharded rank are gathered from the masters."""
    work = getattr(model.masters, "work", {})
    return {name: weight.detach().float().cpu().numpy().copy() for name, weight in work.items()}


def _one_more(average: Numbers, weights: Numbers) -> Numbers:
    """The next average: the product and the sum are rounded once, as of a fused multiply-add."""
    share = np.float64(np.float32(1 - (SETTINGS.decay or 0)))
    return {
        name: (share * np.float64(weights[name] - old) + np.float64(old)).astype(np.float32)
        for name, old in average.items()
    }


def _differences(what: str, found: Numbers, right: Numbers) -> list[str]:
    return [f"{what}: {name} differs" for name in right if found[name].tobytes() != right[name].tobytes()]
