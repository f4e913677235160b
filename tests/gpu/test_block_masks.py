"""On a GPU attention by blocks is attention by positions, alone and in compiled blocks. Skips itself without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.layers.attention import DotProduct, build_mask
from lmtrain.models.layers.flex_attention_block_masks import build_block_mask
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from tests.marks import wide
from tests.unit.kernels.interpreted import DTYPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ROWS, HEADS = 2, 8


def attended(given: list[Tensor], grad: Tensor, mask: Any, core: Any) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [x.detach().requires_grad_() for x in given]
    y = core(*leaves, mask)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compiled", [False, True], ids=["alone", "in_a_graph"])
def test_layers_of_a_pattern_equal_the_cpus(compiled: bool) -> None:
    """Layers with a window and without, and capped scores without documents, of a whole model on block masks."""
    settings = GPTSettings(
        num_layers=3, width=128, num_heads=4, num_kv_heads=2, seq_len=517, vocab_size=67, positions="rotary",
        window=129, layer_pattern="wfF", local_rotary_base=100.0, attention_cap=2.0, init_std=0.1,
    )  # fmt: skip
    tokens = torch.randint(67, (ROWS, 517), generator=torch.Generator().manual_seed(1))
    outputs = []
    for device in ("cpu", "cuda"):
        model = build_parallel(
            settings, Fp32Settings(), ComputeSettings(compile=compiled and device == "cuda"), torch.device(device),
            seed=1, training=True,
        )  # fmt: skip
        hidden = model.model(Batch(tokens.to(device), tokens.to(device)))
        (gradient,) = torch.autograd.grad(hidden.square().sum(), model.parameters["blocks.0.attention.qkv.weight"])
        outputs.append([hidden.detach().double().cpu(), gradient.double().cpu()])
    for right, found in zip(*outputs, strict=True):
        assert float((found - right).norm() / right.norm()) < 1e-4


def error(found: list[Tensor], right: list[Tensor]) -> list[float]:
    return [float((a.double().cpu() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compiled", [False, True], ids=["alone", "in_a_graph"])
@pytest.mark.parametrize("precision", ["bf16", *wide("fp32", "fp16")])
@pytest.mark.parametrize(("kv_heads", "head_width"), [(HEADS, 64), *wide((2, 96), (HEADS, 128))])
@pytest.mark.parametrize(
    ("length", "window", "scores"),
    [
        (1024, None, {}), (1000, 129, {}), (517, 64, {}), (1000, 129, {"cap": 2.0}),
        (517, None, {"scale": 0.3, "cap": 5.0}),
    ],
)  # fmt: skip
def test_attention_by_blocks_is_as_exact_as_by_positions(
    length: int, window: int | None, scores: dict[str, float], kv_heads: int, head_width: int, precision: str,
    compiled: bool,
) -> None:  # fmt: skip
    """Beside the CPU's fp64: at most twice the error of a mask of positions in the same numbers."""
    generator, dtype = torch.Generator().manual_seed(length + kv_heads), DTYPES[precision]
    sizes = [(ROWS, length, heads, head_width) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    q, k, v, grad = (torch.randn(size, generator=generator).to(dtype).transpose(1, 2) for size in sizes)
    documents_BT = (torch.rand(ROWS, length, generator=generator) < 0.01).cumsum(1).to(torch.int32)
    options: dict[str, Any] = {"causal": True, "window": window}
    core = DotProduct(0.0, causal=True, **scores)
    exact = build_mask(length, documents_BT=documents_BT, device=torch.device("cpu"), **options)
    right = attended([x.double() for x in (q, k, v)], grad.double(), exact, core)

    there: dict[str, Any] = options | {"documents_BT": documents_BT.cuda(), "device": torch.device("cuda")}
    given = [x.cuda() for x in (q, k, v)]
    plain = error(attended(given, grad.cuda(), build_mask(length, **there), core), right)
    by_blocks = torch.compile(core, dynamic=False, fullgraph=True) if compiled else core
    found = error(attended(given, grad.cuda(), build_block_mask(length, **there), by_blocks), right)
    assert all(one <= 2 * other for one, other in zip(found, plain, strict=True)), (found, plain)
