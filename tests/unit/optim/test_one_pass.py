"""One pass of clipping, AdamW and rounding equals the three passes one after the other, by the kernel's twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lmtrain.kernels import adamw as kernel
from lmtrain.kernels import triton_availability
from lmtrain.kernels.adamw_tensors_and_rates import AdamWTensors
from lmtrain.optim.adamw import OnePassAdamW, build
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.optim.optimizer_state import apply_num_updates, num_updates, state_tensors
from lmtrain.optim.parameter_groups import apply_learning_rate, build_groups
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import (
    Bf16Settings,
    ComputeSettings,
    Fp16Settings,
    PrecisionSettings,
)
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.parallel.weights.reduce_and_clip_gradients import apply_clip, clip_factor
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.unit.parallel.test_apply import CPU, SETTINGS, step_of

SHAPES = {"a.weight": (7, 4), "norm.weight": (4,), "b.weight": (5, 16)}
ADAMW = AdamWSettings(lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)


def weights() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def one_pass_of(parameters: dict[str, nn.Parameter], monkeypatch: pytest.MonkeyPatch) -> OnePassAdamW:
    with monkeypatch.context() as patch:
        patch.setattr(triton_availability, "FUSED_DEVICES", {"cpu"})
        optimizer = build(ADAMW, build_groups(parameters, ADAMW.weight_decay))
    assert isinstance(optimizer, OnePassAdamW)
    return optimizer


def test_equals_three_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = weights(), weights()
    three, one = build(ADAMW, build_groups(plain, ADAMW.weight_decay)), one_pass_of(ours, monkeypatch)
    assert not isinstance(three, OnePassAdamW)
    copies: dict[torch.Tensor, torch.Tensor] = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in ours.values()}
    one.compute_copies = copies
    for step in range(4):
        for parameters, optimizer in ((plain, three), (ours, one)):
            set_gradients(parameters, step)
            apply_learning_rate(optimizer, 0.1 / (step + 1))
        norm = torch.tensor(3.0)
        apply_clip([p.grad for p in plain.values() if p.grad is not None], norm, 0.5, 2.0)
        one.gradient_factor = clip_factor(norm, 0.5, 2.0)
        three.step()
        one.step()
    for name, right in plain.items():
        torch.testing.assert_close(ours[name], right, rtol=1e-5, atol=1e-6)
        assert torch.equal(copies[ours[name]], ours[name].bfloat16())
    memory = state_tensors(one, ours)
    for name, slot in state_tensors(three, plain).items():
        torch.testing.assert_close(memory[name], slot, rtol=1e-5, atol=1e-6)
    assert num_updates(one) == num_updates(three) == 4


def test_goes_on_from_what_the_other_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a run on CPUs goes on on GPUs, and back."""
    plain, ours = weights(), weights()
    three, one = build(ADAMW, build_groups(plain, ADAMW.weight_decay)), one_pass_of(ours, monkeypatch)
    set_gradients(plain, 0)
    three.step()
    for name, parameter in plain.items():
        ours[name].data.copy_(parameter.data)
    for name, tensor in state_tensors(one, ours).items():
        tensor.copy_(state_tensors(three, plain)[name])
    apply_num_updates(one, num_updates(three))
    for parameters, optimizer in ((plain, three), (ours, one)):
        set_gradients(parameters, 1)
        optimizer.step()
    for name, right in plain.items():
        torch.testing.assert_close(ours[name], right, rtol=1e-5, atol=1e-6)


def trained(
    uses_fused_kernels: bool, monkeypatch: pytest.MonkeyPatch, precision: PrecisionSettings = Bf16Settings()
) -> tuple[ParallelModel, list[float]]:
    with monkeypatch.context() as patch:
        patch.setattr(triton_availability, "FUSED_DEVICES", {"cpu"} if uses_fused_kernels else set())
        model = build_parallel(SETTINGS, precision, ComputeSettings(), CPU, seed=1, training=True)
        optimizer = build_optimizer(ADAMW, model)
        assert isinstance(optimizer, OnePassAdamW) is uses_fused_kernels
        assert any(line.startswith("kernels") for line in model.applied) is uses_fused_kernels
        results = [train_step(model, optimizer, step_of(2), 1e-3, 0.1) for _ in range(3)]
    # because: a wrong factor of all gradients is seen in what the optimizer remembers, and hardly in its update
    memory = [float(tensor.norm()) for tensor in state_tensors(optimizer, model.parameters).values()]
    return model, [*memory, *(number for result in results for number in (result.loss, result.grad_norm))]


def test_a_model_computes_with_what_the_pass_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = trained(True, monkeypatch)
    _, right = trained(False, monkeypatch)
    assert found == pytest.approx(right, rel=2e-2)
    for master, work in model.masters.compute_copies.items():
        assert torch.equal(work, master.bfloat16())


def test_the_loss_scale_is_taken_out_of_the_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    precision = Fp16Settings(initial_scale=8.0)
    _, right = trained(False, monkeypatch, precision)
    assert trained(True, monkeypatch, precision)[1] == pytest.approx(right, rel=2e-2)


def test_a_planted_bug_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass forgets the weights that compute."""
    right = kernel.step

    def forgets(moved: list[AdamWTensors], *rest: object) -> None:
        right([replace(one, compute_copy=None) for one in moved], *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "step", forgets)
    with pytest.raises(AssertionError):
        test_a_model_computes_with_what_the_pass_has_written(monkeypatch)
