"""Every kernel beside its twin on the device itself, at the sizes of real models. Skips itself without a GPU."""

from __future__ import annotations

import pytest
import torch

from lmtrain.kernels import triton_availability
from lmtrain.models.layers.block import MLP
from tests.unit.kernels.interpreted import DTYPES, KERNELS, LIMITS, SIZES, compare_far_rows, kinds_that_hide_nan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
LARGE = {"row_statistics": (64, 50304), "overwrite_with_gradient": (64, 50304), "forward": (300, 4096),
         "backward": (300, 4096), "update": (1024, 3072), "direction": (1024, 3072)}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_equals_its_twin(kernel: str, dtype: str) -> None:
    assert triton_availability.HAS_TRITON
    for rows, columns in (*SIZES, LARGE[kernel]):
        with torch.device("cuda"):
            found = KERNELS[kernel](rows, columns, DTYPES[dtype])
        assert found[kernel] <= LIMITS[dtype], (rows, columns)


def test_rows_may_begin_further_apart_than_32_bits_count() -> None:
    with torch.device("cuda"):
        assert compare_far_rows()["far"] <= LIMITS["bf16"]


def test_no_activation_hides_a_broken_number() -> None:
    with torch.device("cuda"):
        assert kinds_that_hide_nan() == []


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # because: an fp32 product that is to be exact
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("kind", "gated"), [("gelu", False), ("gelu_tanh", False), ("relu2", False), ("silu", True), ("gelu_tanh", True)]
)
def test_an_mlp_equals_the_plain_one(kind: str, gated: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mlp = MLP(256, 1024, kind, gated=gated, bias=True, dropout=0.0).cuda()  # type: ignore[arg-type]
    x, grad = torch.randn(2, 8, 64, 256, device="cuda")
    forward = torch.compile(mlp, fullgraph=True, dynamic=False) if compiled else mlp
    found = torch.autograd.grad(forward(x), list(mlp.parameters()), grad)
    monkeypatch.setattr(triton_availability, "FUSED_DEVICES", set())
    right = torch.autograd.grad(mlp(x), list(mlp.parameters()), grad)
    for one, other in zip(found, right, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-4
