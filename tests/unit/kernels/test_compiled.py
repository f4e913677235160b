"""Every kernel compiles for a Hopper, which needs no GPU; where numbers lie well, its loads are wide. The interpreter
runs a kernel as Python and would not notice what the compiler refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmtrain.kernels.triton_availability import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
WIDE = "global.v4.b32"
KINDS = (
    ("gelu", False), ("gelu_tanh", False), ("silu", False), ("relu", False), ("relu2", False), ("silu", True)
)  # fmt: skip
BF16, FP32, INT64 = "*bf16", "*fp32", "*i64"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def assembly(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> str:
    """PTX for sm_90, with addresses and counts that are multiples of 16, as they mostly are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind != "fp32"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.asm["cubin"]
    text: str = compiled.asm["ptx"]
    return text


def test_the_loss() -> None:
    from lmtrain.kernels import triton_cross_entropy as room

    counts = {"stride": "i32", "num_columns": "i32"}
    rows = {"logits": BF16, "column": INT64, "sums": FP32, "num_rows": "i32"}
    assert WIDE in assembly(room._cross_entropy_sums, rows | counts, {"BLOCK": room.BLOCK})
    rows = {"logits": BF16, "column": INT64, "top": FP32, "total": FP32, "weight": FP32}
    assert WIDE in assembly(room._cross_entropy_gradient, rows | counts, {"BLOCK": room.BLOCK})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "gated"), KINDS)
def test_activations(kind: str, gated: bool, bias: bool) -> None:
    from lmtrain.kernels import triton_activations as room

    signature = {"product": BF16, "num_rows": "i32", "num_columns": "i32"} | ({"bias": BF16} if bias else {})
    constants: dict[str, Any] = {"KIND": kind, "GATED": gated, "HAS_BIAS": bias}
    constants |= {"ROWS": room.ROWS, "COLUMNS": room.COLUMNS}
    constants |= {} if bias else {"bias": None}
    assert WIDE in assembly(room._activation_forward, signature | {"y": BF16}, constants)
    signature |= {"grad": BF16, "grad_x": BF16, "sums": FP32}
    constants |= {"ROWS_OF_A_SUM": room.ROWS_OF_A_SUM, "STAGES": room.STAGES}
    assert WIDE in assembly(room._activation_backward, signature, constants)


@pytest.mark.parametrize("divisor", [16, 1])
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(("rounded", "directs"), [("bfloat16", False), ("float16", False), (None, False), (None, True)])
def test_an_update(rounded: str | None, directs: bool, clips: bool, divisor: int) -> None:
    import torch

    from lmtrain.kernels import triton_adamw as room

    rates = ("kept", "step_size", "root", "eps", "beta1", "rest1", "beta2", "rest2")
    signature = dict.fromkeys(("addresses", "tensor_of", "start_of", "size_of"), INT64) | dict.fromkeys(rates, "fp32")
    signature |= {"factor": FP32} if clips else {}
    constants: dict[str, Any] = {"HAS_FACTOR": clips, "DIRECTS": directs, "DIVISOR": divisor}
    constants |= {"BLOCK": room.BLOCK, "CHUNK": room.CHUNK}
    constants |= {"ROUNDED": room._DTYPES[getattr(torch, rounded)] if rounded else None}
    constants |= {} if clips else {"factor": None}
    assert (WIDE in assembly(room._adamw_step, signature, constants)) == (divisor == 16)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels that are compiled for a Hopper with what they are launched with, and run nowhere."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    names: list[str] = []
    right = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found = right(self, *args, grid=grid, warmup=True, **options)
        assert found.asm["cubin"]
        names.append(self.fn.__name__)
        return found

    monkeypatch.setattr(JITFunction, "run", compiled)
    target = GPUTarget("cuda", 90, 32)
    nobody = 99  # because: what is compiled here is kept by the number of its device, and must not be taken for another
    pretended = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: nobody, get_current_stream=lambda device: 0
    )  # fmt: skip
    monkeypatch.setattr(driver, "_active", pretended)  # because: without a GPU there is no other to put back
    return names


def test_what_is_launched_with_one_row_of_one_column(launched: list[str]) -> None:
    """because: a launch makes a constant of a number that is 1, which no signature above says, and of what is None"""
    import torch

    from lmtrain.kernels import triton_activations, triton_adamw, triton_cross_entropy
    from lmtrain.kernels.adamw_tensors_and_rates import AdamWTensors, Rates

    logits_NV, column_N = torch.zeros(1, 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    sums_3N = triton_cross_entropy.row_statistics(logits_NV, column_N)
    triton_cross_entropy.overwrite_with_gradient(logits_NV, column_N, *sums_3N.unbind())
    assert launched == ["_cross_entropy_sums", "_cross_entropy_gradient"]
    launched.clear()
    for kind, gated in KINDS:
        product = torch.zeros(1, 2 if gated else 1, dtype=torch.bfloat16)
        for bias in (product[0].clone(), None):
            grad = triton_activations.forward(product, bias, kind, gated)
            triton_activations.backward(grad, product, bias, kind, gated)
    assert launched == 12 * ["_activation_forward", "_activation_backward"]
    launched.clear()
    weight, gradient, first, second = torch.zeros(4, 1, 1).unbind()
    rates = Rates(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, count=1)
    for rounded in (logits_NV, None):
        moved = [AdamWTensors(weight, gradient, first, second, rounded)]
        triton_adamw.step(moved, rates, torch.ones(()))
    triton_adamw.step(moved, rates, None, as_directions=True)
    assert launched == 3 * ["_adamw_step"]
