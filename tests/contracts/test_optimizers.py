"""Every optimizer that has a config trains, and goes on from its saved state as if it had not stopped."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import compose_plain
from lmtrain.optim import optimizer_state
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.optim.parameter_groups import apply_learning_rate, build_groups
from tests.contracts.plugin import PLUGIN_CONF, choices

NAMES = choices("optim")
WEIGHT, BIAS = "blocks.0.fit.weight", "blocks.0.fit.bias"


@cache
def settings_of(name: str) -> OptimSettings:
    plain = compose_plain(["data.path=x", f"optim={name}"], config_dir=PLUGIN_CONF)
    return build_settings(OptimSettings, plain["optim"], "optim")


class Problem:
    """A least-squares fit of a matrix and a vector: small, with a known best loss of 0."""

    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 4, generator=generator)
        self.y = self.x @ torch.randn(4, 3, generator=generator) + 1.0
        # named as in a block, for optimizers that treat a block's matrices apart
        weight, bias = torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(3))
        self.parameters = {WEIGHT: weight, BIAS: bias}
        self.settings = settings_of(name)
        build = self.settings.component().build
        self.optimizer: torch.optim.Optimizer = build(self.settings, build_groups(self.parameters, 0.0))

    def step(self) -> float:
        loss = (self.x @ self.parameters[WEIGHT] + self.parameters[BIAS] - self.y).square().mean()
        for parameter in self.parameters.values():
            parameter.grad = None
        torch.autograd.backward(loss)
        apply_learning_rate(self.optimizer, 0.05)
        self.optimizer.step()
        return loss.item()


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: str) -> None:
    problem = Problem(name)
    first = problem.step()
    assert [problem.step() for _ in range(200)][-1] < first / 50


@pytest.mark.parametrize("name", NAMES)
def test_its_state_is_all_it_needs_to_go_on(name: str) -> None:
    whole, resumed = Problem(name), Problem(name)
    for _ in range(5):
        whole.step()
    for key, parameter in resumed.parameters.items():
        parameter.data.copy_(whole.parameters[key].data)
    saved = optimizer_state.state_tensors(whole.optimizer, whole.parameters)
    for key, tensor in optimizer_state.state_tensors(resumed.optimizer, resumed.parameters).items():
        tensor.copy_(saved[key])
    optimizer_state.apply_num_updates(resumed.optimizer, optimizer_state.num_updates(whole.optimizer))
    assert [resumed.step() for _ in range(5)] == [whole.step() for _ in range(5)]


@pytest.mark.parametrize("name", NAMES)
def test_its_settings_know_its_memory(name: str) -> None:
    """Torch-free: the layout table prices a run by it."""
    problem = Problem(name)
    tensors = optimizer_state.state_tensors(problem.optimizer, problem.parameters)
    slots = Counter(key.split(".", 1)[1] for key in tensors)
    assert slots == {key: problem.settings.num_slots(key, tuple(p.shape)) for key, p in problem.parameters.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_learning_rate_of_nothing_is_refused(name: str) -> None:
    from lmtrain.errors import SettingsError

    with pytest.raises(SettingsError, match=r"optim\.lr=0"):
        build_settings(OptimSettings, settings_of(name).to_dict() | {"lr": 0.0}, "optim")
