"""AdamW equals a plain numpy one, and its memory moves by name between optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import SettingsError
from lmtrain.optim.adamw import build
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.optimizer_state import apply_empty_state, apply_num_updates, num_updates, state_tensors
from lmtrain.optim.parameter_groups import apply_learning_rate, build_groups

SHAPES = {"embedding.token.weight": (7, 4), "norm.weight": (4,), "mlp.up.weight": (5, 4), "mlp.up.bias": (5,)}


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def optimizer_of(weights: dict[str, nn.Parameter], **changes: Any) -> torch.optim.Optimizer:
    settings = AdamWSettings(lr=0.1, weight_decay=0.2, **changes)
    return build(settings, build_groups(weights, settings.weight_decay))


def set_gradients(weights: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in weights.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def updated(weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(weights, step)
        apply_learning_rate(optimizer, 0.1 / (step + 1))
        optimizer.step()


def test_equals_the_formula() -> None:
    weights = parameters()
    expected = {name: p.detach().numpy().astype(np.float64) for name, p in weights.items()}
    moments = {name: (np.zeros(shape), np.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = optimizer_of(weights, betas=(0.8, 0.9), eps=1e-6)
    updated(weights, optimizer, range(5))
    for step in range(5):
        fresh = parameters()
        set_gradients(fresh, step)
        lr = 0.1 / (step + 1)
        for name, (first, second) in moments.items():
            gradient = fresh[name].grad.numpy().astype(np.float64)  # type: ignore[union-attr]
            first[:] = 0.8 * first + 0.2 * gradient
            second[:] = 0.9 * second + 0.1 * gradient**2
            decay = 0.2 if len(SHAPES[name]) == 2 else 0.0
            value = expected[name] * (1 - lr * decay)
            root = np.sqrt(second / (1 - 0.9 ** (step + 1))) + 1e-6
            expected[name] = value - lr * first / (1 - 0.8 ** (step + 1)) / root
    for name, parameter in weights.items():
        assert np.abs(parameter.detach().numpy() - expected[name]).max() < 1e-5, name
    assert num_updates(optimizer) == 5


def test_matrices_decay_and_vectors_do_not() -> None:
    weights = parameters()
    groups = build_groups(weights, 0.3)
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert [decays[id(p)] for p in weights.values()] == [0.3, 0.0, 0.3, 0.0]
    assert len(build_groups({"norm.weight": weights["norm.weight"]}, 0.3)) == 1


def test_state_goes_round_by_name() -> None:
    """Five updates equal two, a move of state and weights to a new optimizer, and three more: bit for bit."""
    weights = parameters()
    optimizer = optimizer_of(weights)
    updated(weights, optimizer, range(2))
    state = {name: tensor.clone() for name, tensor in state_tensors(optimizer, weights).items()}
    assert set(state) == {f"{slot}.{name}" for slot in ("exp_avg", "exp_avg_sq") for name in SHAPES}
    assert all(tensor.shape == SHAPES[name.split(".", 1)[1]] for name, tensor in state.items())
    count = num_updates(optimizer)
    again = {name: nn.Parameter(weights[name].detach().clone()) for name in reversed(SHAPES)}
    moved = optimizer_of(again)
    for name, tensor in state_tensors(moved, again).items():
        tensor.copy_(state[name])
    apply_num_updates(moved, count)
    assert num_updates(moved) == count == 2
    updated(weights, optimizer, range(2, 5))
    for step in range(2, 5):
        gradients = parameters()
        set_gradients(gradients, step)
        for name, parameter in again.items():
            parameter.grad = gradients[name].grad
        apply_learning_rate(moved, 0.1 / (step + 1))
        moved.step()
    assert all(torch.equal(again[name], weights[name]) for name in SHAPES)


def test_empty_state_changes_nothing() -> None:
    plain, prepared = parameters(), parameters()
    first, second = optimizer_of(plain), optimizer_of(prepared)
    assert num_updates(second) == 0
    apply_empty_state(second)
    assert num_updates(second) == 0
    assert all((tensor == 0).all() for tensor in state_tensors(second, prepared).values())
    updated(plain, first, range(3))
    updated(prepared, second, range(3))
    assert all(torch.equal(prepared[name], plain[name]) for name in SHAPES)


def test_state_tensors_are_the_live_ones() -> None:
    """Filling them in place is loading, which is how a checkpoint does it."""
    weights = parameters()
    optimizer = optimizer_of(weights)
    state_tensors(optimizer, weights)["exp_avg.norm.weight"].fill_(3.0)
    apply_num_updates(optimizer, 9)
    assert (optimizer.state[weights["norm.weight"]]["exp_avg"] == 3.0).all()
    updated(weights, optimizer, range(1))
    assert num_updates(optimizer) == 10


def test_learning_rate_can_be_scaled_by_group() -> None:
    optimizer = optimizer_of(parameters())
    optimizer.param_groups[1]["lr_scale"] = 0.5
    apply_learning_rate(optimizer, 0.4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.2]


def test_fused_where_there_is_a_fused_form() -> None:
    assert optimizer_of(parameters()).defaults["fused"] is True
    with torch.device("meta"):
        on_meta = {"w": nn.Parameter(torch.empty(2, 2))}
    assert optimizer_of(on_meta).defaults["fused"] is False


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 0.0), ("lr", float("inf")), ("weight_decay", -0.1), ("clip_norm", 0.0),
        ("betas", [0.9]), ("betas", [0.9, 1.0]), ("eps", 0.0),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"optim.{key}="):
        build_settings(OptimSettings, {"kind": "adamw", "lr": 1e-3, key: value}, "optim")


@pytest.mark.parametrize("key", ["lr", "weight_decay", "clip_norm"])
def test_what_is_not_finite_is_refused_where_settings_are_made_in_python(key: str) -> None:
    for value in (float("nan"), float("inf")):
        changes: dict[str, Any] = {"lr": 1e-3, key: value}
        with pytest.raises(SettingsError, match=key):
            AdamWSettings(**changes)


def test_settings_go_round() -> None:
    settings = build_settings(OptimSettings, {"kind": "adamw", "lr": 1e-3, "clip_norm": None}, "optim")
    assert settings == AdamWSettings(lr=1e-3, clip_norm=None)
    assert build_settings(OptimSettings, settings.to_dict(), "optim") == settings
