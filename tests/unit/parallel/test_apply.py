"""ParallelModel: the step's gradient whatever the microbatch, logits of the true vocabulary, pieces without padding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from lmtrain.batch import IGNORED, Batch, StepBatches
from lmtrain.errors import LayoutError
from lmtrain.layout import Layout
from lmtrain.models.gpt_settings import GPTSettings
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

SETTINGS = GPTSettings(
    num_layers=2, width=16, num_heads=2, vocab_size=13, vocab_multiple=8, seq_len=8, positions="learned",
    norm="layernorm", activation="gelu", bias="all", tied=True, dropout=0.0,
)  # fmt: skip
CPU = torch.device("cpu")


def model_of(
    settings: GPTSettings = SETTINGS, precision: PrecisionSettings | None = None, seed: int | None = 1
) -> ParallelModel:
    return build_parallel(settings, precision or Fp32Settings(), ComputeSettings(), CPU, seed=seed, training=True)


def step_of(num_microbatches: int, step: int = 0) -> StepBatches:
    """Eight samples, some labels ignored unevenly, cut into microbatches."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(13, (8, 8), generator=generator)
    labels = torch.randint(13, (8, 8), generator=generator)
    labels[0, 2:] = IGNORED
    labels[5] = IGNORED
    batches = [Batch(t, y) for t, y in zip(tokens.chunk(num_microbatches), labels.chunk(num_microbatches), strict=True)]
    return StepBatches(step, batches, 8, (int((labels != IGNORED).sum()),), np.arange(8), labels.numel())


def gradients(model: ParallelModel) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.parameters.items() if p.grad is not None}


def test_the_microbatch_does_not_change_the_gradient() -> None:
    """Though valid labels are spread unevenly over microbatches: the division is by the global count."""
    whole, parts = model_of(), model_of()
    loss = whole.forward_backward(step_of(1)).sum()
    assert parts.forward_backward(step_of(8)).sum().item() == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("precision", "tolerance"), [(Bf16Settings(), 0.05), (Fp16Settings(), 0.01)])
def test_half_precision_gradients_follow_fp32(precision: PrecisionSettings, tolerance: float) -> None:
    exact, half = model_of(), model_of(precision=precision)
    exact.forward_backward(step_of(4))
    half.forward_backward(step_of(4))
    half.finish_gradients(None)
    for name, gradient in gradients(exact).items():
        error = (gradients(half)[name] - gradient).norm() / (gradient.norm() + 1e-6)
        assert error < tolerance or name.endswith("qkv.bias"), (name, error)


def test_dropout_is_a_function_of_seed_step_and_microbatch() -> None:
    dropping = dataclasses.replace(SETTINGS, dropout=0.5)
    first = model_of(dropping).forward_backward(step_of(2, step=4))
    torch.manual_seed(99)
    again = model_of(dropping).forward_backward(step_of(2, step=4))
    other = model_of(dropping).forward_backward(step_of(2, step=5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_step_after_an_evaluation_drops_again() -> None:
    dropping = dataclasses.replace(SETTINGS, dropout=0.5)
    straight, asked = model_of(dropping), model_of(dropping)
    list(asked.scores(step_of(1).microbatches))
    assert torch.equal(asked.forward_backward(step_of(2)), straight.forward_backward(step_of(2)))


def test_logits_are_of_the_true_vocabulary_and_of_kept_positions() -> None:
    model = model_of()
    batch = step_of(1).microbatches[0]
    every = model.logits(batch)
    assert every.shape == (8, 8, 13)
    keep = torch.zeros(8, 8, dtype=torch.bool)
    keep[2, 3] = keep[7, 0] = True
    torch.testing.assert_close(model.logits(batch, keep), torch.stack([every[2, 3], every[7, 0]]))


def test_pieces_hold_true_rows_once() -> None:
    pieces = {piece.name: piece for piece in model_of().pieces()}
    assert pieces["model.embedding.token.weight"].global_shape == (13, 16)
    assert "model.head.weight" not in pieces  # tied: counted and saved under its first name


def test_no_seed_leaves_zeros_to_be_loaded() -> None:
    assert all(not piece.block.any() for piece in model_of(seed=None).pieces())


def test_several_processes_are_refused() -> None:
    with pytest.raises(LayoutError, match="Start 2 processes"):
        build_parallel(
            SETTINGS, Fp32Settings(), ComputeSettings(), CPU, seed=1, training=True, mesh=build_mesh(Layout(tp=2), CPU)
        )
