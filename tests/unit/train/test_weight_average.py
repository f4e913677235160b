"""The average of the weights equals a loop over the weights of every step, and a measurement of it leaves no trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtrain.checkpoint.weight_ema_settings import WeightAverageSettings
from lmtrain.layout import Layout
from lmtrain.parallel.device_and_precision_settings import Fp16Settings
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.parallel.weights.master_weights import MasterWeights
from lmtrain.train.exponential_weight_average import WeightAverage
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.unit.parallel.spread import OPTIM, build, step_of

Weights = dict[str, Any]  # of arrays
STEPS, DECAY = 6, 0.9
OVERFLOWS = Fp16Settings(initial_scale=2.0**21)  # the first steps change no weight


def now(tensors: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def averages(history: Sequence[Weights], settings: WeightAverageSettings) -> list[Weights | None]:
    """The average after each step, by the formula, with one rounding of the product and the sum as of a fused
    multiply-add; entry 0 of the history is that of the first weights.
    """
    assert settings.decay is not None
    share, average, found = np.float32(1 - settings.decay), None, list[Weights | None]()
    for step, weights in enumerate(history):
        if average is None:
            average = weights if step >= settings.from_step else None
        elif step % settings.every_steps == 0:
            average = {
                name: (np.float64(share) * np.float64(weights[name] - old) + np.float64(old)).astype(np.float32)
                for name, old in average.items()
            }
        found.append(average)
    return found


def trained(model: ParallelModel, average: WeightAverage, steps: int = STEPS) -> tuple[list[Weights], list[Weights]]:
    """The weights and their average before the first step and after each."""
    optimizer = build_optimizer(OPTIM, model)
    average.begin(0)
    num_skipped = 0
    weights, averaged = [now(model.parameters)], [now(average.tensors)]
    for step in range(steps):
        done = train_step(model, optimizer, step_of(step, Layout(), 1, 0), OPTIM.lr, OPTIM.clip_norm)
        average.update(step + 1)
        num_skipped += done.skipped
        weights.append(now(model.parameters))
        averaged.append(now(average.tensors))
    assert model.loss_scale.settings is not OVERFLOWS or 0 < num_skipped < steps
    return weights, averaged


@pytest.mark.parametrize("precision", ["fp32", "bf16", OVERFLOWS])
@pytest.mark.parametrize(("every_steps", "from_step"), [(1, 0), (2, 3)])
def test_it_equals_a_loop_over_the_weights(
    precision: str | Fp16Settings, every_steps: int, from_step: int
) -> None:
    settings = WeightAverageSettings(decay=DECAY, every_steps=every_steps, from_step=from_step)
    model = build({}, precision)
    average = WeightAverage(model.masters, settings)
    weights, averaged = trained(model, average)
    expected = averages(weights, settings)
    assert average.since_step == from_step
    for step, right in enumerate(expected):
        if right is not None:
            for name, numbers in right.items():
                np.testing.assert_array_equal(averaged[step][name], numbers, f"{name} after step {step}")
    last = averaged[-1]
    assert any((last[name] != weights[-1][name]).any() for name in last), "an average that is the weights says nothing"


def test_without_a_decay_nothing_is_kept() -> None:
    model = build({})
    average = WeightAverage(model.masters, WeightAverageSettings())
    trained(model, average, steps=1)
    assert not average.has_begun
    assert not average.tensors


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_stands_in_place_of_the_weights_and_gives_them_back(precision: str, is_stopped: bool) -> None:
    model = build({}, precision)
    average = WeightAverage(model.masters, WeightAverageSettings(decay=DECAY))
    trained(model, average)
    batches = step_of(9, Layout(), 1, 0).microbatches
    masters = model.masters
    assert isinstance(masters, MasterWeights)

    def held() -> list[Weights]:
        work = {name: weight.detach().float() for name, weight in masters.work.items()}
        return [now(model.parameters), now(work), now(average.tensors)]

    def losses() -> Tensor:
        return torch.stack(list(model.validation_sums(batches)))

    before, of_weights = held(), losses()
    try:
        with average.in_place_of_weights():
            inside, of_average = held(), losses()
            if is_stopped:
                raise TimeoutError
    except TimeoutError:
        assert is_stopped
    np.testing.assert_equal(held(), before)
    assert torch.equal(losses(), of_weights)
    np.testing.assert_equal([inside[0], inside[2]], [before[2], before[0]])
    with torch.no_grad():
        for name, numbers in average.tensors.items():
            model.parameters[name].copy_(numbers)
        masters.publish()
    assert torch.equal(losses(), of_average)
    assert not torch.equal(of_average, of_weights)
