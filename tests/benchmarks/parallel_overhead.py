"""What the parallel path costs the host, side by side: against a plain module, and against torch's DTensor.

    python -m tests.benchmarks.parallel_overhead

Eager on the CPU with a 64-wide block, where the arithmetic is next to nothing and what is left is overhead. Contenders
take turns window by window in the same processes, each bound to a core, and medians are compared. CPU time is that of
all ranks together.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from lmtrain.batch import Batch, StepBatches
from lmtrain.layout import Coordinate, Layout
from lmtrain.models.gpt import GPT, build
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.initial_weights import apply_ties
from lmtrain.models.layers.block import BlockContext
from lmtrain.models.objectives.cross_entropy import cross_entropy_sum
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.mesh import build_mesh
from lmtrain.parallel.tensor_parallel import apply_tensor_parallel
from lmtrain.placement.layers_and_shards_of_ranks import place_parameters
from tests.layouts.workers import Pool
from tests.unit.models.first_weights import start

SETTINGS = GPTSettings(
    num_layers=4, width=64, num_heads=4, vocab_size=64, vocab_multiple=1, seq_len=16, activation="gelu_tanh"
)
SAMPLES, WINDOWS, ITERATIONS, WARM_UP = 2, 31, 10, 20
MOST_OVER_PLAIN, MOST_OVER_DTENSOR = 1.25, 0.40
CPU = torch.device("cpu")
Times = dict[str, float]


def main() -> int:
    with Pool() as pool:
        (one,) = pool.run("tests.benchmarks.parallel_overhead:one_process", 1)
        two = pool.run("tests.benchmarks.parallel_overhead:two_processes", 2)
    layers = SETTINGS.num_layers
    path, plain = one["parallel path"] / layers, one["plain module"] / layers
    print(f"torch {torch.__version__}: CPU us of a layer forward and backward, all ranks, medians of {WINDOWS} windows")
    print(f"tp=1  parallel path {path:6.0f}   plain module {plain:6.0f}   {path / plain:.2f} x, most {MOST_OVER_PLAIN}")
    ours, theirs = (sum(rank[name] for rank in two) for name in ("local shards", "DTensor"))
    share = ours / theirs
    print(f"tp=2  local shards  {ours:6.0f}   full DTensor {theirs:6.0f}   {share:.2f} x, most {MOST_OVER_DTENSOR}")
    return int(path > MOST_OVER_PLAIN * plain or share > MOST_OVER_DTENSOR)


def take_turns(contenders: dict[str, Callable[[], object]]) -> Times:
    """Median CPU microseconds of one call of each, in windows that alternate."""
    windows: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        for _ in range(WARM_UP):
            call()
    for _ in range(WINDOWS):
        for name, call in contenders.items():
            began = time.process_time()
            for _ in range(ITERATIONS):
                call()
            windows[name].append((time.process_time() - began) / ITERATIONS * 1e6)
    return {name: statistics.median(times) for name, times in windows.items()}


def one_process() -> Times:
    """A step's forward and backward through ParallelModel, and through the module it is made of."""
    tokens = torch.randint(SETTINGS.vocab_size or 0, (SAMPLES, SETTINGS.seq_len))
    batch = Batch(tokens, tokens.roll(-1, dims=1))
    step = StepBatches(0, [batch], SAMPLES, (tokens.numel(),), np.arange(SAMPLES), tokens.numel())
    model = build_parallel(SETTINGS, Fp32Settings(), ComputeSettings(device="cpu"), CPU, seed=1, training=True)
    plain = whole_model()

    def parallel_path() -> None:
        model.forward_backward(step)

    def plain_module() -> None:
        for parameter in plain.parameters():
            parameter.grad = None
        loss = cross_entropy_sum(plain.logits(plain(batch)), batch.labels_BT) / tokens.numel()
        torch.autograd.backward(loss)

    return take_turns({"parallel path": parallel_path, "plain module": plain_module})


def two_processes() -> Times:
    """One block forward and backward, cut in two by lmtrain and by DTensor; both must equal the whole block."""
    stay_on_one_core(dist.get_rank())
    layout, whole = Layout(tp=2), whole_model()
    ours = cut_model(layout, whole).blocks["0"]
    theirs = cut_by_dtensor(ThreeLinears(deepcopy(whole.blocks["0"])))
    torch.manual_seed(0)
    x_BTD = torch.randn(SAMPLES, SETTINGS.seq_len, SETTINGS.width, requires_grad=True)
    around = BlockContext()
    right = gradient_of(lambda: whole.blocks["0"](x_BTD, around), x_BTD, whole)

    def local_shards() -> Tensor:
        return gradient_of(lambda: ours(x_BTD, around), x_BTD, ours)

    def dtensor() -> Tensor:
        return gradient_of(lambda: theirs(x_BTD), x_BTD, theirs)

    torch.testing.assert_close(local_shards(), right)
    torch.testing.assert_close(dtensor(), right)
    return take_turns({"local shards": local_shards, "DTensor": dtensor})


def stay_on_one_core(rank: int) -> None:
    """As srun binds its tasks. because: waking a thread on another core may cost more than what is measured"""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def gradient_of(forward: Callable[[], Tensor], x: Tensor, module: nn.Module) -> Tensor:
    for parameter in module.parameters():
        parameter.grad = None
    x.grad = None
    torch.autograd.backward(forward().square().sum())
    assert x.grad is not None
    return x.grad


def whole_model() -> GPT:
    with torch.device("meta"):
        model = build(SETTINGS)
    model.to_empty(device=CPU)
    apply_ties(model)
    start(model, seed=1)
    return model


@torch.no_grad()
def cut_model(layout: Layout, whole: GPT) -> GPT:
    """This rank's part of the whole model, without sequence parallelism."""
    mesh = build_mesh(layout, CPU, timeout_s=60.0)
    with torch.device("meta"):
        model = build(SETTINGS)
    apply_tensor_parallel(model, mesh.tp, sequence_parallel=False)
    model.to_empty(device=CPU)
    shapes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    coordinate = Coordinate(0, 0, 0, mesh.tp.index)
    places = place_parameters(shapes, whole.cuts(), layout, coordinate, SETTINGS.shape.vocab_size)
    for name, place in places.items():
        for block in place.regions:
            source = tuple(slice(o, o + n) for o, n in zip(block.offset, block.shape, strict=True))
            model.get_parameter(name)[block.local] = whole.get_parameter(name)[source]
    return model


class ThreeLinears(nn.Module):
    """The same block with its own linear for queries, keys and values: DTensor cannot cut a fused one by heads."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        self.attention = ThreeLinearsAttention(block.attention)
        self.up, self.down = block.mlp.up, block.mlp.down

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        y: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x_BTD)), approximate="tanh"))
        return x_BTD + y


class ThreeLinearsAttention(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.head_width, self.out = attention.head_width, attention.out
        sections = zip(attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3), strict=True)
        self.query, self.key, self.value = (linear_of(weight, bias) for weight, bias in sections)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            linear(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


def linear_of(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return linear


class Replicated(ParallelStyle):
    """Weights that every rank holds, as DTensors on the same mesh: clipping and optimizers need one mesh for all."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def wrap(_: nn.Module, inputs: Any, mesh: Any) -> Any:
            return tuple(DTensor.from_local(x, mesh, (Replicate(),), run_check=False) for x in inputs)

        def unwrap(_: nn.Module, output: Any, mesh: Any) -> Any:
            return output.redistribute(placements=(Replicate(),)).to_local()

        return distribute_module(module, device_mesh, None, wrap, unwrap)


def cut_by_dtensor(block: ThreeLinears) -> nn.Module:
    """As torch's guide does it, with attention's input made a DTensor once, which saves two sums in backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    once = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "attention_norm": Replicated(), "mlp_norm": Replicated(), "attention": once,
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(),
    }  # fmt: skip
    cut: nn.Module = parallelize_module(block, mesh, plan)
    return cut


if __name__ == "__main__":
    raise SystemExit(main())
