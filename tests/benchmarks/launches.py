"""Kernels launched and bytes moved by one microbatch's forward and backward of a block, counted and not timed.

    python -m tests.benchmarks.launches

Eager: every operator that is not a view, with what it reads and writes. Compiled: what Inductor has made of the block,
after fusion, and the operators outside of its graphs, as those that add a weight's gradient to its fp32 sum. As on a
GPU: compiled, with products that sum and kernels of our own, each counted as the one launch that it is there. Bound:
each product reads two matrices and writes one, attention reads q, k and v and writes y, and backward of either
likewise: what would be left if everything else were part of these.

On a GPU if there is one. Inductor fuses loops into Triton there and into C++ on a CPU, by rules that are mostly but not
all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmtrain.batch import Batch
from lmtrain.kernels import triton_availability
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.blocks.recompute_and_compile import apply_compile
from lmtrain.parallel.linear_forward_backward_products import apply_summing_linears, summing_modules
from lmtrain.parallel.weights.master_weights import MasterWeights
from lmtrain.placement.attention_activation_bytes import FP32_BYTES
from lmtrain.spec import ModelShape
from tests.layouts.bugs import replaced

ROWS, LENGTH, NUMBER_BYTES = 4, 512, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRODUCTS, FUSED, OPERATORS = "products and attention", "fused", "operators"
SIZE: dict[str, Any] = {"num_layers": 1, "vocab_size": 64, "seq_len": LENGTH}
MODELS = {
    "GPT-2": GPTSettings(width=768, num_heads=12, **SIZE),
    "BERT": BertSettings(width=768, num_heads=12, **SIZE),
    "LLaMA-like": GPTSettings(
        width=768, num_heads=12, num_kv_heads=4, ffn_width=2048, bias="none", tied=False, positions="rotary",
        norm="rmsnorm", activation="silu", gated=True, **SIZE,
    ),
}  # fmt: skip
LARGE = GPTSettings(num_layers=32, width=3072, num_heads=32, vocab_size=50264, seq_len=1024)  # High-Flyer's 3.8B
FREE = ("view", "alias", "detach", "expand", "permute", "transpose", "t", "split", "slice", "select", "unsqueeze",
        "squeeze", "as_strided", "chunk", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided",
        "split_with_sizes", "_unsafe_view", "_reshape_alias")  # fmt: skip


@dataclass
class Counted:
    launches: int = 0
    size_bytes: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)  # bytes

    def add(self, kind: str, size_bytes: int) -> None:
        self.launches += 1
        self.size_bytes += size_bytes
        self.by_kind[kind] = self.by_kind.get(kind, 0) + size_bytes


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Those that Python or autograd asks for; what Inductor's own code calls is counted with its graphs."""

    def __init__(self, into: Counted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.into = into

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if name not in FREE and not _of_inductor():
            self.into.add(OPERATORS, sum(map(_touched, tree_leaves((args, kwargs, result)))))
        return result


def _touched(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _of_inductor() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if "torchinductor" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@contextmanager
def graphs(into: Counted) -> Iterator[None]:
    """Everything that Inductor compiles inside."""

    def count(nodes: list[Any]) -> list[Any]:
        for node in nodes:
            if isinstance(node, NopKernelSchedulerNode) or not (size := node.get_read_write_buffers_sizes()):
                continue
            ours = str(getattr(node.node, "op_overload", "")).startswith("lmtrain.activated")
            into.add(PRODUCTS if isinstance(node, ExternKernelSchedulerNode) and not ours else FUSED, size)
        return nodes

    # because: a graph that is found in a cache is not scheduled again
    with config.patch(_post_fusion_custom_pass=count, force_disable_caches=True):
        yield


def block_of(settings: Any, *, sums: bool = False) -> tuple[Any, Callable[[], Tensor]]:
    """One block in bf16 with its fp32 masters, and what runs its forward on a batch that lies there."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = settings.build()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        block = model.blocks["0"]
        if sums:
            apply_summing_linears(model)
        modules = summing_modules(block) if sums else ()
        block.masters = MasterWeights(dict(block.named_parameters()), torch.bfloat16, modules)
        block.masters.clear_gradients(num_microbatches=2)
        tokens_BT = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        not_padding_BT = None if settings.shape.causal else torch.arange(LENGTH) < torch.tensor([[LENGTH]] * ROWS) - 7
        around = model.block_contexts(Batch(tokens_BT, tokens_BT, not_padding_BT=not_padding_BT))["0"]
        x_BTD = torch.randn(ROWS, LENGTH, settings.width).bfloat16().requires_grad_()
    return model, lambda: block(x_BTD, around)


def eager(settings: Any) -> Counted:
    _, forward = block_of(settings)
    _backward(forward())  # because: a first gradient is taken over and not added
    found = Counted()
    with Operators(found):
        _backward(forward())
    return found


def compiled(settings: Any, *, sums: bool = False) -> Counted:
    model, forward = block_of(settings, sums=sums)
    apply_compile(model, deterministic=False)
    found = Counted()
    with graphs(found):
        _backward(forward())
    y = forward()
    with Operators(found):
        _backward(y)
    return found


def as_on_a_gpu(settings: Any) -> Counted:
    with replaced(triton_availability, "FUSED_DEVICES", {DEVICE}):
        return compiled(settings, sums=True)


def _backward(y: Tensor) -> None:
    torch.autograd.backward(y, y.detach())


def bound(shape: ModelShape, num_tokens: int) -> Counted:
    """Each product forward and its two backward; attention, which keeps two sums of each row and head in fp32."""
    n, found = num_tokens, Counted()
    heads, keys = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    up = shape.ffn_width * (1 + shape.gated)
    for inputs, outputs in (
        (shape.width, heads + 2 * keys), (heads, shape.width), (shape.width, up), (shape.ffn_width, shape.width),
    ):  # fmt: skip
        x, y, weight = (size * NUMBER_BYTES for size in (n * inputs, n * outputs, inputs * outputs))
        found.add(PRODUCTS, x + weight + y)
        found.add(PRODUCTS, y + weight + x)
        found.add(PRODUCTS, y + x + 2 * FP32_BYTES * inputs * outputs)  # adds to its fp32 sum
    rows, sums = NUMBER_BYTES * n, FP32_BYTES * n * shape.num_heads
    found.add(PRODUCTS, rows * (2 * heads + 2 * keys) + sums)
    found.add(PRODUCTS, rows * (4 * heads + 4 * keys) + sums)
    return found


@dataclass(frozen=True)
class Law:
    """Bytes of a block of these proportions at any size: loops by tokens x width, operators of weights by weights."""

    fused: float  # a token and number of the width
    weights: float  # a number of the weights, by what is left to operators

    @classmethod
    def of(cls, found: Counted, shape: ModelShape) -> Law:
        fused, left = (found.by_kind.get(kind, 0) for kind in (FUSED, OPERATORS))
        return cls(fused / (ROWS * LENGTH * shape.width), left / shape.block_matrix_params)

    def at(self, shape: ModelShape, num_tokens: int) -> dict[str, float]:
        sums = 2 * FP32_BYTES * shape.block_matrix_params  # which the bound has products make
        return {
            PRODUCTS: bound(shape, num_tokens).size_bytes - sums,
            FUSED: self.fused * num_tokens * shape.width,
            OPERATORS: self.weights * shape.block_matrix_params,
        }


def main() -> None:
    print(f"{ROWS} x {LENGTH} tokens, bf16, torch {torch.__version__}, kernels for {DEVICE}")
    print(f"{'block':12}{'':10}{'launches':>10}{'MB':>10}{'of the bound':>14}   MB by kind")
    laws = {}
    for name, settings in MODELS.items():
        least = bound(settings.shape, ROWS * LENGTH)
        with replaced(triton_availability, "FUSED_DEVICES", set()):
            found = {"eager": eager(settings), "compiled": compiled(settings)}
        found |= {"as on GPU": as_on_a_gpu(settings), "bound": least}
        laws[name] = Law.of(found["as on GPU"], settings.shape)
        for how, one in found.items():
            share = one.size_bytes / least.size_bytes
            kinds = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in one.by_kind.items())
            print(f"{name:12}{how:10}{one.launches:>10}{one.size_bytes / 1e6:>10.1f}{share:>13.2f}x   {kinds}")
    print_large(laws["GPT-2"])


def print_large(law: Law) -> None:
    """High-Flyer's 3.8B has GPT-2's proportions; that the law holds is seen at half of GPT-2's size."""
    half = replace(MODELS["GPT-2"], width=384, num_heads=6)
    said, found = law.at(half.shape, ROWS * LENGTH), as_on_a_gpu(half).by_kind
    print(f"GPT-2 half as wide, MB as said and counted: fused {said[FUSED] / 1e6:.1f} and {found[FUSED] / 1e6:.1f}")
    blocks = LARGE.num_layers
    for rows in (8, 16):
        num_tokens = rows * LARGE.seq_len
        sizes = law.at(LARGE.shape, num_tokens)
        kinds = ", ".join(f"{kind} {size * blocks / 1e9:.0f}" for kind, size in sizes.items())
        least = bound(LARGE.shape, num_tokens).size_bytes
        print(f"3.8B, {blocks} blocks, {rows} x {LARGE.seq_len} tokens: {sum(sizes.values()) * blocks / 1e9:.0f} GB, "
              f"bound {least * blocks / 1e9:.0f} GB ({kinds})")  # fmt: skip


if __name__ == "__main__":
    main()
