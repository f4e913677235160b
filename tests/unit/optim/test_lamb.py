"""LAMB against the paper's loop over layers, and on shards against itself on whole weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import SettingsError
from lmtrain.optim.interface_to_whole_weights import LocalTensors, WholeTensors
from lmtrain.optim.lamb import LAMB, build
from lmtrain.optim.lamb_settings import LAMBSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.parameter_groups import build_groups
from tests.unit.optim.fused import asked_of_kernels
from tests.unit.optim.pretended import stepped

SHAPES = {"embedding.token.weight": (7, 4), "blocks.0.up.weight": (5, 4), "blocks.0.up.bias": (5,), "norm.weight": (4,)}
SETTINGS = LAMBSettings(lr=0.05, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-4)


def draws(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer_of(weights: dict[str, nn.Parameter], whole: WholeTensors = LocalTensors(), **changes: Any) -> LAMB:
    settings = build_settings(LAMBSettings, SETTINGS.to_dict() | changes)
    return build(settings, build_groups(weights, settings.weight_decay), whole)


def updated(weights: dict[str, Tensor], num_steps: int, **changes: Any) -> dict[str, Tensor]:
    parameters = {name: nn.Parameter(w.clone()) for name, w in weights.items()}
    optimizer = optimizer_of(parameters, **changes)
    for step in range(num_steps):
        for name, gradient in draws(100 + step).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def reference(weights: dict[str, Tensor], num_steps: int) -> dict[str, Tensor]:
    """Algorithm 2 of You et al. with phi(z) = z, number by number in double precision; vectors take Adam's step."""
    (first, second), eps, lr = SETTINGS.betas, SETTINGS.eps, SETTINGS.lr
    result = {}
    for name, start in weights.items():
        x = start.double()
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for step in range(num_steps):
            g = draws(100 + step)[name].double()
            m, v = first * m + (1 - first) * g, second * v + (1 - second) * g * g
            r = (m / (1 - first ** (step + 1))) / ((v / (1 - second ** (step + 1))).sqrt() + eps)
            if x.ndim == 1:
                x = x - lr * r
            else:
                u = r + SETTINGS.weight_decay * x
                x = x - lr * (math.sqrt(x.square().sum()) / math.sqrt(u.square().sum())) * u
        result[name] = x
    return result


def test_equals_the_papers_algorithm() -> None:
    weights = draws(0)
    expected = reference(weights, 5)
    for name, found in updated(weights, 5).items():
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_matrix_moves_by_a_share_of_its_length() -> None:
    """Whatever the size of the gradients: the first step is lr x |w| long."""
    weights = draws(1)
    for name, found in updated(weights, 1).items():
        if weights[name].ndim == 2:
            assert (found - weights[name]).norm() / weights[name].norm() == pytest.approx(SETTINGS.lr, rel=1e-5), name


def test_so_does_a_matrix_whose_squares_add_up_to_millions() -> None:
    """Torch's own norm errs by 1e-4 on a CPU, which adds four million squares up in fp32."""
    start = torch.rand(1000, 4000, generator=torch.Generator().manual_seed(3)) + 0.5
    weight = nn.Parameter(start.clone())
    optimizer = optimizer_of({"blocks.0.up.weight": weight}, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moved = (weight.detach().double() - start.double()).norm() / start.double().norm()
    assert moved.item() == pytest.approx(SETTINGS.lr, rel=2e-5)


def test_new_zero_weights_move_as_adam_would() -> None:
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for name, found in updated(zeros, 1).items():
        assert found.abs().max() == pytest.approx(SETTINGS.lr, rel=1e-3), name


def test_a_weight_without_a_gradient_stays() -> None:
    parameters = {name: nn.Parameter(w) for name, w in draws(0).items()}
    before = parameters["norm.weight"].detach().clone()
    optimizer = optimizer_of(parameters)
    for name, gradient in draws(100).items():
        parameters[name].grad = None if parameters[name].ndim == 1 else gradient
    optimizer.step()
    assert torch.equal(parameters["norm.weight"], before)


@pytest.mark.parametrize(("copies", "shards"), [(1, 2), (1, 6), (2, 3)])
def test_shards_step_as_the_whole(copies: int, shards: int) -> None:
    """Rows of each weight on each rank, some ranks with none, some ranks with the same ones; one sum a step."""
    weights, num_steps = draws(2), 4
    gradients = [draws(100 + step) for step in range(num_steps)]
    found, board = stepped(weights, gradients, optimizer_of, copies=copies, shards=shards, sections={})
    assert board.num_sums == num_steps
    for name, expected in updated(weights, num_steps).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def test_the_kernel_of_directions_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its twin, of matrices and vectors."""
    right = updated(draws(0), 4)
    asked = asked_of_kernels(monkeypatch)
    found = updated(draws(0), 4)
    assert asked
    for name, expected in right.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def test_settings() -> None:
    settings = build_settings(OptimSettings, {"kind": "lamb", "lr": 1e-2}, "optim")
    assert settings == LAMBSettings(lr=1e-2)
    assert settings.eps == 1e-6
    with pytest.raises(SettingsError, match=r"optim\.betas="):
        build_settings(OptimSettings, {"kind": "lamb", "lr": 1e-2, "betas": [0.9]}, "optim")
