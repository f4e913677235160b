"""Muon: matrices in blocks against a plain loop, the rest against torch's AdamW, shards against the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import SettingsError
from lmtrain.optim import muon
from lmtrain.optim.interface_to_whole_weights import LocalTensors, WholeTensors
from lmtrain.optim.muon import Muon, build, orthogonalize
from lmtrain.optim.muon_settings import MuonSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.parameter_groups import build_groups
from tests.unit.optim.fused import asked_of_kernels
from tests.unit.optim.pretended import stepped

QKV = "blocks.0.attention.qkv.weight"
SHAPES = {
    "embedding.token.weight": (9, 6), QKV: (12, 6), "blocks.0.mlp.up.weight": (16, 6),
    "blocks.0.mlp.down.weight": (6, 16), "blocks.0.mlp.up.bias": (16,), "norm.weight": (6,),
}  # fmt: skip
SECTIONS = {QKV: (6, 3, 3), "blocks.0.mlp.up.weight": (8, 8)}
SETTINGS = MuonSettings(lr=0.02, weight_decay=0.2, betas=(0.8, 0.9), momentum=0.9)


def draws(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer_of(weights: dict[str, nn.Parameter], whole: WholeTensors) -> Muon:
    return build(SETTINGS, build_groups(weights, SETTINGS.weight_decay), whole)


def updated(weights: dict[str, Tensor], num_steps: int) -> dict[str, Tensor]:
    parameters = {name: nn.Parameter(w.clone()) for name, w in weights.items()}
    optimizer = optimizer_of(parameters, LocalTensors(SECTIONS))
    for step in range(num_steps):
        for name, gradient in draws(100 + step).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def slow_orthogonal(x: Tensor) -> Tensor:
    """Jordan's iteration as he writes it, on rows no longer than columns."""
    if x.shape[0] > x.shape[1]:
        return slow_orthogonal(x.T).T
    x = x / math.sqrt(x.square().sum())
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def reference(name: str, start: Tensor, num_steps: int) -> Tensor:
    """One matrix with its sections apart, in double precision."""
    result = []
    sections = SECTIONS.get(name, (start.shape[0],))
    for index, x in enumerate(start.double().split(sections)):  # type: ignore[no-untyped-call]
        average = torch.zeros_like(x)
        for step in range(num_steps):
            g = draws(100 + step)[name].double().split(sections)[index]  # type: ignore[no-untyped-call]
            average = SETTINGS.momentum * average + (1 - SETTINGS.momentum) * g
            ahead = SETTINGS.momentum * average + (1 - SETTINGS.momentum) * g
            x = x * (1 - SETTINGS.lr * SETTINGS.weight_decay)
            x = x - SETTINGS.lr * 0.2 * math.sqrt(max(x.shape)) * slow_orthogonal(ahead)
        result.append(x)
    return torch.cat(result)


@pytest.mark.parametrize("shape", [(24, 24), (48, 12), (12, 48), (1, 8)])
def test_the_step_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    """Singular values near 1 and singular vectors those of the input, however unlike its own values are."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(0, 1, shape[1])
    y = orthogonalize(x, 5)
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.6
    assert values.max() < 1.25
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    assert nn.functional.cosine_similarity(y.flatten(), (u @ vh).flatten(), dim=0) > 0.97


def test_nothing_becomes_nothing() -> None:
    assert torch.equal(orthogonalize(torch.zeros(3, 4), 5), torch.zeros(3, 4))


def test_hidden_matrices_equal_a_plain_loop() -> None:
    weights, num_steps = draws(0), 4
    found = updated(weights, num_steps)
    for name in (name for name in SHAPES if name.startswith("blocks.") and len(SHAPES[name]) == 2):
        expected = reference(name, weights[name], num_steps)
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-5)


def test_all_else_equals_torchs_adamw() -> None:
    weights, num_steps = draws(0), 4
    found = updated(weights, num_steps)
    for name in ("embedding.token.weight", "blocks.0.mlp.up.bias", "norm.weight"):
        parameter = nn.Parameter(weights[name].clone())
        decay = SETTINGS.weight_decay if parameter.ndim == 2 else 0.0
        betas = (SETTINGS.betas[0], SETTINGS.betas[1])
        twin = torch.optim.AdamW([parameter], SETTINGS.lr, betas, SETTINGS.eps, weight_decay=decay)
        for step in range(num_steps):
            parameter.grad = draws(100 + step)[name]
            twin.step()
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_step_is_as_large_as_adamws() -> None:
    """The root mean square of a matrix's step is 0.2 lr at any shape: one learning rate serves both halves."""
    torch.manual_seed(0)
    for shape in ((64, 64), (256, 64), (64, 256)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape)
        build(SETTINGS, build_groups({"blocks.0.weight": parameter}, 0.0)).step()
        assert parameter.square().mean().sqrt().item() == pytest.approx(0.2 * SETTINGS.lr, rel=0.25), shape


@pytest.mark.parametrize(("copies", "shards"), [(1, 2), (1, 7), (2, 2)])
def test_shards_step_as_the_whole(copies: int, shards: int) -> None:
    """Rows of each weight on each rank, cut across sections, some ranks with none: the same matrices as one process."""
    weights, num_steps = draws(2), 3
    gradients = [draws(100 + step) for step in range(num_steps)]
    found, _ = stepped(weights, gradients, optimizer_of, copies=copies, shards=shards, sections=SECTIONS)
    for name, expected in updated(weights, num_steps).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-7)


def test_each_matrix_is_made_orthogonal_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step, whatever the number of processes: six, with the sections of a fused weight apart."""
    done: list[tuple[int, ...]] = []

    def counted(x: Tensor, rounds: int) -> Tensor:
        done.append(tuple(x.shape))
        return orthogonalize(x, rounds)

    weights, gradients = draws(2), [draws(100)]
    for copies, shards in ((1, 1), (1, 3), (2, 2)):
        done.clear()
        with monkeypatch.context() as patch:
            patch.setattr(muon, "orthogonalize", counted)
            stepped(weights, gradients, optimizer_of, copies=copies, shards=shards, sections=SECTIONS)
        assert sorted(done) == [(3, 6), (3, 6), (6, 6), (6, 16), (8, 6), (8, 6)]


def test_the_kernel_of_directions_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its twin, of what is no hidden matrix."""
    right = updated(draws(0), 4)
    asked = asked_of_kernels(monkeypatch)
    found = updated(draws(0), 4)
    assert asked
    for name, expected in right.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("key", "value"), [("momentum", 1.0), ("newton_schulz_rounds", 0), ("eps", 0.0)])
def test_wrong_settings_are_refused(key: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"optim.{key}="):
        build_settings(OptimSettings, {"kind": "muon", "lr": 1e-3, key: value}, "optim")
