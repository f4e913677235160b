"""On a GPU attention by blocks is attention by positions, alone and in compiled blocks. Skips itself without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.models.layers.attention import DotProduct, build_mask
from lmtrain.models.layers.block_masks import build_block_mask
from tests.marks import wide
from tests.unit.kernels.interpreted import DTYPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ROWS, HEADS = 2, 8


def attended(given: list[Tensor], grad: Tensor, mask: Any, core: Any) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [x.detach().requires_grad_() for x in given]
    y = core(*leaves, mask)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def error(found: list[Tensor], right: list[Tensor]) -> list[float]:
    return [float((a.double().cpu() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compiled", [False, True], ids=["alone", "in_a_graph"])
@pytest.mark.parametrize("precision", ["bf16", *wide("fp32", "fp16")])
@pytest.mark.parametrize(("kv_heads", "head_width"), [(HEADS, 64), *wide((2, 96), (HEADS, 128))])
@pytest.mark.parametrize(("length", "window"), [(1024, None), (1000, 129), (517, 64)])
def test_attention_by_blocks_is_as_exact_as_by_positions(
    length: int, window: int | None, kv_heads: int, head_width: int, precision: str, compiled: bool
) -> None:
    """Beside the CPU's fp64: at most twice the error of a mask of positions in the same numbers."""
    generator, dtype = torch.Generator().manual_seed(length + kv_heads), DTYPES[precision]
    sizes = [(ROWS, length, heads, head_width) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    q, k, v, grad = (torch.randn(size, generator=generator).to(dtype).transpose(1, 2) for size in sizes)
    documents_BT = (torch.rand(ROWS, length, generator=generator) < 0.01).cumsum(1).to(torch.int32)
    options: dict[str, Any] = {"causal": True, "window": window}
    core = DotProduct(0.0, causal=True)
    exact = build_mask(length, documents_BT=documents_BT, device=torch.device("cpu"), **options)
    right = attended([x.double() for x in (q, k, v)], grad.double(), exact, core)

    there: dict[str, Any] = options | {"documents_BT": documents_BT.cuda(), "device": torch.device("cuda")}
    given = [x.cuda() for x in (q, k, v)]
    plain = error(attended(given, grad.cuda(), build_mask(length, **there), core), right)
    by_blocks = torch.compile(core, dynamic=False, fullgraph=True) if compiled else core
    found = error(attended(given, grad.cuda(), build_block_mask(length, **there), by_blocks), right)
    assert all(one <= 2 * other for one, other in zip(found, plain, strict=True)), (found, plain)
