"""What `compute.compile: auto` comes to, that a model is compiled by it, and what deterministic does to a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmtrain.errors import SettingsError
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.placement.parallel_settings import ParallelSettings

CPU = torch.device("cpu")
MODEL = GPTSettings(num_layers=3, width=8, num_heads=2, seq_len=8, vocab_size=16)
PLAIN = ParallelSettings()
TAKEN_APART = ParallelSettings(pp=2, schedule="zb_h1")
NOISY = ParallelSettings(tp=2, sequence_parallel=False)


@pytest.mark.parametrize(
    ("parallel", "uses_dropout", "on_gpu", "expected", "words"),
    [
        (PLAIN, True, True, True, "each block, and the loss"),
        (PLAIN, True, False, False, "nothing, since no GPU"),
        (TAKEN_APART, False, True, False, "nothing: parallel.schedule=zb_h1 runs a block's backward in two halves"),
        (NOISY, True, True, False, "nothing: parallel.sequence_parallel=false leaves attention's dropout"),
        (NOISY, False, True, True, "each block, and the loss"),
    ],
)
def test_auto_compiles_on_a_gpu_where_the_layout_allows_it(
    parallel: ParallelSettings, uses_dropout: bool, on_gpu: bool, expected: bool, words: str
) -> None:
    compute = ComputeSettings()
    assert compute.compile == "auto"
    assert compute.compiles(parallel, uses_dropout=uses_dropout, on_gpu=on_gpu) is expected
    assert compute.describe_compile(parallel, uses_dropout=uses_dropout, on_gpu=on_gpu).startswith(words)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_is_chosen_stays_so(chosen: bool, on_gpu: bool) -> None:
    compute = ComputeSettings(compile=chosen)
    assert compute.compiles(PLAIN, uses_dropout=False, on_gpu=on_gpu) is chosen
    assert compute.describe_compile(PLAIN, uses_dropout=False, on_gpu=on_gpu).startswith("each") is chosen


def test_tf32_is_of_gpus() -> None:
    with pytest.raises(SettingsError, match="tf32=true works only on a GPU, not with device=cpu"):
        ComputeSettings(device="cpu", tf32=True)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the compiler is told of each function that it is given."""
    told: list[Any] = []

    def recorded(function: Any, *, dynamic: bool, options: Any) -> Any:
        assert not dynamic
        told.append(options)
        return function

    monkeypatch.setattr(torch, "compile", recorded)
    return told


def build(compute: ComputeSettings) -> Any:
    return build_parallel(MODEL, Fp32Settings(), compute, CPU, seed=1, training=True)


def test_a_cpu_does_not_compile_by_itself(options: list[Any]) -> None:
    model = build(ComputeSettings())
    assert not model.compiled
    assert not options
    assert not any("compile" in line for line in model.applied)


def test_each_block_and_the_loss_are_compiled(options: list[Any]) -> None:
    model = build(ComputeSettings(compile=True))
    assert model.compiled
    assert options == [None] * 4
    assert model.applied[-3:-1] == ["compile: 3 blocks, each separately", "compile: the loss"]


def test_deterministic_tells_the_compiler_so(options: list[Any]) -> None:
    """It must know the word: torch refuses an option that it has not."""
    build(ComputeSettings(compile=True, deterministic=True))
    assert options == [{"deterministic": True}] * 4
    assert "deterministic" in torch._inductor.list_options()
