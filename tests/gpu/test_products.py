"""On a GPU a product adds to its fp32 sum by itself, in eager and compiled blocks. Skips itself without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lmtrain.parallel.linear_forward_backward_products import SummingLinear, add_product, reset_gradient_totals

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ROWS, IN, OUT = 4096, 1024, 3072


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def distance(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_exact_to_fp32(dtype: torch.dtype) -> None:
    total, right = (torch.zeros(OUT, IN, dtype=kind, device="cuda") for kind in (torch.float32, torch.float64))
    for seed in range(8):
        rows, inputs = drawn(ROWS, OUT, dtype=dtype, seed=seed), drawn(ROWS, IN, dtype=dtype, seed=100 + seed)
        add_product(total, rows, inputs)
        right += rows.double().t() @ inputs.double()
    assert distance(total, right) < 1e-5


@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_adds_in_place(compiled: bool) -> None:
    torch.manual_seed(0)
    own = SummingLinear(nn.Linear(IN, OUT)).to("cuda", torch.bfloat16)
    reset_gradient_totals([own], 3)
    assert own.gradient_total is not None
    memory, right = own.gradient_total.data_ptr(), torch.zeros(OUT, IN, dtype=torch.float64, device="cuda")
    forward = torch.compile(own, fullgraph=True, dynamic=False) if compiled else own
    for seed in range(3):
        x = drawn(ROWS, IN, dtype=torch.bfloat16, seed=seed)
        weight = drawn(ROWS, OUT, dtype=torch.bfloat16, seed=100 + seed)
        (forward(x) * weight).sum().backward()
        right += weight.double().t() @ x.double()
    assert own.gradient_total.data_ptr() == memory
    assert own.weight.grad is None
    assert distance(own.gradient_total, right) < 1e-5
