"""The Triton kernels of activations.py: tiles of rows and columns, computed in fp32. Imported only on a GPU machine.

Each program of backward covers a block of rows of its columns and writes their partial sum; adding the partial sums
afterwards costs little.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 4, 512  # of a tile; because: in fp32 this is 16 numbers per thread
ROWS_OF_A_SUM = 64  # because: the fp32 partial sums then add only 2% to the half-precision memory traffic
NUM_WARPS = 4
STAGES = 3  # pipelined tiles of backward; because: on an H200 three stages save a seventh of the time
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_INNER = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi); Triton's interpreter needs a constexpr as the right operand
_CUBIC = tl.constexpr(0.044715)


def forward(product: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
    """Return f(product + bias), where f is the activation `kind`, computed by a Triton kernel. If `gated`, return
    f(gate) * up of [gate | up] in the last dim of the sum.
    """
    product = product.contiguous()
    parts = 2 if gated else 1
    num_columns = product.shape[-1] // parts
    y = torch.empty(*product.shape[:-1], num_columns, dtype=product.dtype, device=product.device)
    num_rows = y.numel() // num_columns
    if num_rows:
        _activation_forward[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS))](
            product, bias, y, num_rows, num_columns,
            KIND=kind, GATED=gated, HAS_BIAS=bias is not None, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
        )  # fmt: skip
    return y


def backward(grad: Tensor, product: Tensor, bias: Tensor | None, kind: str, gated: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of `product` and of `bias` in `forward`, given `grad`, the gradient of its output, computed
    by a Triton kernel. The second is an empty tensor if `bias` is None.
    """
    grad, product = grad.contiguous(), product.contiguous()
    num_columns = grad.shape[-1]
    num_rows = grad.numel() // num_columns
    grad_x, blocks = torch.empty_like(product), triton.cdiv(num_rows, ROWS_OF_A_SUM)
    width = product.shape[-1] if bias is not None else 0
    sums = torch.empty(blocks, width, dtype=torch.float32, device=product.device)
    if num_rows:
        _activation_backward[(triton.cdiv(num_columns, COLUMNS), blocks)](
            grad, product, bias, grad_x, sums, num_rows, num_columns,
            KIND=kind, GATED=gated, HAS_BIAS=bias is not None, ROWS=ROWS, COLUMNS=COLUMNS, ROWS_OF_A_SUM=ROWS_OF_A_SUM,
            STAGES=STAGES, num_warps=NUM_WARPS,
        )  # fmt: skip
    return grad_x, sums.sum(0).to(product.dtype if bias is None else bias.dtype)


@triton.jit
def _positive(x):
    return tl.where(x < 0.0, 0.0, x)  # because: tl.maximum would turn NaN into 0 and so hide a broken number


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "relu":
        y = _positive(x)
    elif KIND == "relu2":
        y = _positive(x) * _positive(x)
    elif KIND == "gelu":
        y = x * (0.5 * (1.0 + tl.erf(x * _ROOT_HALF)))
    else:  # (1 + tanh z) / 2 is sigmoid(2 z)
        y = x * tl.sigmoid((x + x * x * x * _CUBIC) * _INNER * 2.0)
    return y


@triton.jit
def _slope(x, KIND: tl.constexpr):
    if KIND == "silu":
        share = tl.sigmoid(x)
        slope = share * (1.0 + x * (1.0 - share))
    elif KIND == "relu":
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif KIND == "relu2":
        slope = 2.0 * _positive(x)
    elif KIND == "gelu":
        slope = 0.5 * (1.0 + tl.erf(x * _ROOT_HALF)) + x * _DENSITY * tl.exp(-0.5 * x * x)
    else:
        cumulated = tl.sigmoid((x + x * x * x * _CUBIC) * _INNER * 2.0)
        inner = (x * x * _CUBIC * 3.0 + 1.0) * _INNER * 2.0
        slope = cumulated + x * cumulated * (1.0 - cumulated) * inner
    return slope


@triton.jit
def _activation_forward(
    product, bias, y, num_rows, num_columns,
    KIND: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (at < num_columns)[None, :]
    out = row[:, None] * num_columns + at[None, :]
    place = out
    if GATED:
        place = row[:, None] * (2 * num_columns) + at[None, :]
    x = tl.load(product + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + at, mask=at < num_columns, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.load(product + place + num_columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += tl.load(bias + num_columns + at, mask=at < num_columns, other=0.0).to(tl.float32)[None, :]
        value = _activate(x, KIND) * up
    else:
        value = _activate(x, KIND)
    tl.store(y + out, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _activation_backward(
    grad, product, bias, grad_x, sums, num_rows, num_columns,
    KIND: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS_OF_A_SUM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = at < num_columns
    # a sum per tile element; because: a sum per column would need a reduction across threads in every iteration
    first = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, ROWS_OF_A_SUM, ROWS, num_stages=STAGES):
        row = block * ROWS_OF_A_SUM + start + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & here[None, :]
        out = row[:, None] * num_columns + at[None, :]
        place = out
        if GATED:
            place = row[:, None] * (2 * num_columns) + at[None, :]
        of_y = tl.load(grad + out, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(product + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + at, mask=here, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up = tl.load(product + place + num_columns, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                up += tl.load(bias + num_columns + at, mask=here, other=0.0).to(tl.float32)[None, :]
            of_x = of_y * up * _slope(x, KIND)
            of_up = of_y * _activate(x, KIND)
            tl.store(grad_x + place + num_columns, of_up.to(grad_x.dtype.element_ty), mask=inside)
            second += of_up
        else:
            of_x = of_y * _slope(x, KIND)
        tl.store(grad_x + place, of_x.to(grad_x.dtype.element_ty), mask=inside)
        first += of_x
    if HAS_BIAS:
        if GATED:
            tl.store(sums + block * (2 * num_columns) + at, tl.sum(first, 0), mask=here)
            tl.store(sums + block * (2 * num_columns) + num_columns + at, tl.sum(second, 0), mask=here)
        else:
            tl.store(sums + block * num_columns + at, tl.sum(first, 0), mask=here)
