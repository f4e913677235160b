"""Kernels beside their twins, run by Triton's interpreter: what a process does for the tests of this folder.

Also taken by tests/gpu, which puts everything on a GPU. `python -m tests.unit.kernels.interpreted` prints, as JSON, how
far each kernel is off for each case, and how far with each planted bug. A process of its own, since Triton decides as
it is imported whether it interprets.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor

from lmtrain.kernels import activations, adamw, cross_entropy, triton_availability
from lmtrain.kernels.adamw_tensors_and_rates import AdamWTensors, Rates
from lmtrain.kernels.cross_entropy import NO_COLUMN
from lmtrain.optim.adamw_settings import AdamWSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp16Settings
from lmtrain.train.set_up_run import build_optimizer
from lmtrain.train.step import train_step
from tests.unit.parallel.test_apply import CPU, SETTINGS, step_of

Off = dict[str, float]  # by kernel
LIMITS = {"fp32": 1e-5, "bf16": 8e-3, "fp16": 5e-4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# because: one column, odd numbers, one more than a block, several blocks with a rest
SIZES = ((1, 1), (3, 67), (5, 129), (4, 383))
BLOCK = 128  # because: a kernel must meet several blocks, and interpreted it is slow


def off(found: Tensor, right: Tensor, given: Tensor | None = None) -> float:
    """The greatest distance, relative to the greatest number, `given`'s too; of infinite ones, that they are the same.

    because: an activation of one number can be far smaller than what it was given, and is as exact as that allows
    """
    if found.shape != right.shape or found.dtype is not right.dtype:
        return math.inf
    found, right = found.double(), right.double()
    ends = ~right.isfinite()
    if not torch.equal(found[ends], right[ends]):
        return math.inf
    if not right[~ends].numel():
        return 0.0
    least = 1e-30 if given is None else float(given.abs().max())
    return float((found - right)[~ends].abs().max() / right[~ends].abs().max().clamp(min=least))


def logits_of(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """With padding at the end, a row of padding alone, and labels of which some are not here."""
    torch.manual_seed(rows * columns)
    logits = 5 * torch.randn(rows, columns)
    logits[:, columns - columns // 5 :] = -math.inf
    if rows > 3:
        logits[2] = -math.inf
    column = torch.randint(columns - columns // 5, (rows,))
    column[1::2] = NO_COLUMN
    return logits.to(dtype), column


def compare_cross_entropy(rows: int, columns: int, dtype: torch.dtype) -> Off:
    from lmtrain.kernels import triton_cross_entropy as kernels

    logits, column = logits_of(rows, columns, dtype)
    # because: a part of a wider tensor has rows that do not lie one behind the other
    logits = torch.cat([logits, torch.full_like(logits, 7.0)], 1)[:, :columns]
    right, found = cross_entropy.row_statistics_in_torch(logits, column), kernels.row_statistics(logits, column)
    top, total, _ = right
    weight = torch.linspace(0.5, 2.0, rows) * (column != NO_COLUMN)
    total = total.masked_fill(total == 0, 1.0)  # of a row of padding alone, to which other ranks add
    exact = cross_entropy.logits_gradient_in_torch(logits, column, top, total, weight)
    written = kernels.overwrite_with_gradient(logits, column, top, total, weight)
    assert written.data_ptr() == logits.data_ptr()
    neighbours = logits.as_strided((rows, columns), logits.stride(), logits.storage_offset() + columns)
    spilled = 0.0 if bool((neighbours == 7.0).all()) else math.inf
    return {"row_statistics": max(map(off, found, right)), "overwrite_with_gradient": max(off(written, exact), spilled)}


def compare_far_rows() -> Off:
    """Rows that begin further apart than 32 bits count, as those of billions of logits do.

    What lies between them is never touched, and so takes no memory of a CPU.
    """
    from lmtrain.kernels import triton_cross_entropy as kernels

    (near, column), stride = logits_of(3, 67, torch.bfloat16), 2**30 + 8
    far = torch.empty(2 * stride + 67, dtype=torch.bfloat16).as_strided((3, 67), (stride, 1)).copy_(near)
    right, found = cross_entropy.row_statistics_in_torch(near, column), kernels.row_statistics(far, column)
    given = (*right[:2], torch.ones(3))
    pairs = zip((*found, kernels.overwrite_with_gradient(far, column, *given)),
                (*right, cross_entropy.logits_gradient_in_torch(near, column, *given)), strict=True)  # fmt: skip
    return {"far": max(off(*pair) for pair in pairs)}


def compare_activations(rows: int, columns: int, dtype: torch.dtype) -> Off:
    from lmtrain.kernels import triton_activations as kernels

    ahead, back = [0.0], [0.0]
    torch.manual_seed(rows * columns)
    kinds: tuple[str, ...] = get_args(activations.Activation)
    for kind, gated in [*((kind, False) for kind in kinds), ("silu", True), ("gelu_tanh", True)]:
        wide = 2 * columns if gated else columns
        shapes = (rows, wide), (wide,), (rows, columns)
        values, bias, grad = (3 * torch.randn(shape) for shape in shapes)
        for given in (bias.to(dtype), None):
            x = values.to(dtype), given, kind, gated
            ahead.append(off(kernels.forward(*x), activations.forward_in_torch(*x), values))
            pairs = kernels.backward(grad.to(dtype), *x), activations.backward_in_torch(grad.to(dtype), *x)
            back += (off(one, other, grad) for one, other in zip(*pairs, strict=True))
    return {"forward": max(ahead), "backward": max(back)}


def kinds_that_hide_nan() -> list[str]:
    """Return the activations whose kernel turns NaN into a number, so that a broken step would not be noticed."""
    from lmtrain.kernels import triton_activations as kernels

    broken = torch.tensor([[math.nan, 1.0]])
    kinds: tuple[str, ...] = get_args(activations.Activation)
    return [kind for kind in kinds if not kernels.forward(broken, None, kind, False)[0, 0].isnan()]


def compare_updates(rows: int, columns: int, dtype: torch.dtype) -> Off:
    """Three steps of several tensors, some of which begin where no wide load may, and one of which is empty."""
    from lmtrain.kernels import triton_adamw as kernels

    torch.manual_seed(rows * columns)
    found = [0.0]
    for factor in (torch.tensor(0.3), None):
        ours = [_moved(shape, dtype) for shape in ((rows, columns), (columns,), (16 * columns,), (0,))]
        theirs = [AdamWTensors(*(_cloned(x) for x in one.tensors)) for one in ours]  # type: ignore[arg-type]
        for count in (1, 2, 3):
            rates = Rates(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5, count=count)
            kernels.step(ours, rates, factor)
            adamw.step_in_torch(theirs, rates, factor)
        for one, other in zip(ours, theirs, strict=True):
            pairs = zip(one.tensors, other.tensors, strict=True)
            found += (off(a, b) for a, b in pairs if a is not None and b is not None)
    return {"update": max(found)}


def compare_directions(rows: int, columns: int, dtype: torch.dtype) -> Off:
    """Of fp32 alone, whatever the precision, as nothing is rounded."""
    from lmtrain.kernels import triton_adamw as kernels

    torch.manual_seed(rows * columns)
    ours = [_moved(shape, torch.float32) for shape in ((rows, columns), (columns,), (16 * columns,))]
    theirs = [AdamWTensors(*(_cloned(x) for x in one.tensors)) for one in ours]  # type: ignore[arg-type]
    for count in (1, 2, 3):
        rates = Rates(lr=1.0, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0, count=count)
        kernels.step(ours, rates, None, as_directions=True)
        adamw.write_directions_in_torch(theirs, rates)
    found, right = ([x for one in moved for x in one.tensors if x is not None] for moved in (ours, theirs))
    return {"direction": max(map(off, found, right))}


def _moved(shape: tuple[int, ...], dtype: torch.dtype) -> AdamWTensors:
    weight, gradient, first = (torch.randn(shape) for _ in range(3))
    if len(shape) == 1 and shape[0] % 16:
        gradient = torch.cat([gradient[:1], gradient])[1:]
    rounded = None if dtype is torch.float32 else torch.zeros(shape, dtype=dtype)
    return AdamWTensors(weight, gradient, first, torch.rand(shape), rounded)


def _cloned(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


KERNELS: dict[str, Callable[[int, int, torch.dtype], Off]] = {
    "row_statistics": compare_cross_entropy, "overwrite_with_gradient": compare_cross_entropy,
    "forward": compare_activations, "backward": compare_activations,
    "update": compare_updates, "direction": compare_directions,
}  # fmt: skip
# kernel, what is wrong, where, the right words of its source, the wrong ones
_SUMS, _GRADIENT = (f"triton_cross_entropy._cross_entropy_{name}" for name in ("sums", "gradient"))
_AHEAD, _BACK = (f"triton_activations._activation_{name}" for name in ("forward", "backward"))
_ACTIVATE, _SLOPE = (f"triton_activations._{name}" for name in ("activate", "slope"))
_STEP = "triton_adamw._adamw_step"
BUGS = [
    ("row_statistics", "the sum is not moved to a higher top", _SUMS, "total * tl.exp(top - higher)", "total"),
    ("row_statistics", "what lies behind the last column counts", _SUMS, 'other=float("-inf")', "other=0.0"),
    ("overwrite_with_gradient", "the label's column is like the others", _GRADIENT, "p - 1.0", "p"),
    ("overwrite_with_gradient", "another row's weight", _GRADIENT, "tl.load(weight + row)", "tl.load(weight)"),
    ("forward", "the second half has the first half's bias", _AHEAD, "bias + num_columns + at", "bias + at"),
    ("forward", "a gate is not activated", _AHEAD, "_activate(x, KIND) * up", "x * up"),
    ("forward", "what is to be squared is not", _ACTIVATE, "_positive(x) * _positive(x)", "_positive(x)"),
    ("forward", "a tanh without its cube", _ACTIVATE, "x + x * x * x * _CUBIC", "x"),
    ("backward", "the slope of silu is that of a sigmoid", _SLOPE, "(1.0 + x * (1.0 - share))", "(1.0 - share)"),
    ("backward", "the slope of relu is that of its square", _SLOPE, "0.0, 1.0)", "0.0, 2.0 * x)"),
    ("backward", "the slope of a square is that of half of it", _SLOPE, "2.0 * _positive(x)", "_positive(x)"),
    ("backward", "what is gated does not meet the gate", _BACK, "of_y * _activate(x, KIND)", "of_y"),
    ("backward", "the bias's sum is that of the last rows", _BACK, "first += of_x", "first = of_x"),
    ("backward", "a density without its number", _SLOPE, "x * _DENSITY", "_DENSITY"),
    ("update", "gradients are not clipped", _STEP, "other=0.0) * scale", "other=0.0)"),
    ("update", "weights do not decay", _STEP, "kept * tl.load", "tl.load"),
    ("direction", "it is that of the weight after it", _STEP, "if not DIRECTS", "if True"),
    ("update", "the second average is of gradients", _STEP, "rest2 * gradient * gradient", "rest2 * gradient"),
    ("update", "what computes is not the new weight", _STEP, "weight.to(ROUNDED)", "first.to(ROUNDED)"),
]


@contextmanager
def planted(place: str, right: str, wrong: str) -> Iterator[None]:
    """Inside, a kernel's source says something else."""
    import triton

    room, name = place.split(".")
    module = sys.modules[f"lmtrain.kernels.{room}"]
    kernel = getattr(module, name)
    source = inspect.getsource(kernel.fn)
    assert source.count(right) == 1, f"{right} stands {source.count(right)} times in {place}"
    names = dict(vars(module))
    # because: the interpreter reads a kernel's source from its file
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        changed = source[source.index("def ") :].replace(right, wrong)
        file.write(changed)
        file.flush()
        exec(compile(changed, file.name, "exec"), names)  # noqa: S102
        setattr(module, name, triton.jit(names[name]))
        yield
    setattr(module, name, kernel)


def measure(kernels: set[str], sizes: tuple[tuple[int, int], ...], dtypes: tuple[str, ...]) -> dict[str, Off]:
    """By size and precision."""
    cases = dict.fromkeys(KERNELS[kernel] for kernel in kernels)
    found: dict[str, Off] = {}
    for rows, columns in sizes:
        for dtype in dtypes:
            for compare in cases:
                found.setdefault(f"{rows}x{columns} {dtype}", {}).update(compare(rows, columns, DTYPES[dtype]))
    return found


def trained(*, by_kernels: bool) -> list[float]:
    """Losses and norms of three steps of a small GPT on the way that a GPU takes, by kernels or by their twins."""
    rooms = (activations, adamw, cross_entropy) if by_kernels else ()
    with ExitStack() as stack:
        stack.enter_context(patch.object(triton_availability, "FUSED_DEVICES", {"cpu"}))
        for room in rooms:
            stack.enter_context(patch.object(room, "can_run_kernel", lambda tensor: True))
        precision = Fp16Settings(initial_scale=64.0)
        model = build_parallel(SETTINGS, precision, ComputeSettings(), CPU, seed=1, training=True)
        optimizer = build_optimizer(AdamWSettings(lr=0.01), model)
        steps = [train_step(model, optimizer, step_of(2), 0.01, 0.5) for _ in range(3)]
    return [number for step in steps for number in (step.loss, step.grad_norm)]


def read_scalars() -> None:
    """because: Triton 3.6 (torch 2.11) has int() read a scalar's array of one number, which numpy refuses since 2.4"""
    from triton.runtime import interpreter

    right = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        right(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor


def main() -> None:
    from lmtrain.kernels import triton_activations, triton_adamw, triton_cross_entropy

    read_scalars()
    triton_cross_entropy.BLOCK = triton_activations.COLUMNS = triton_adamw.BLOCK = BLOCK
    triton_adamw.CHUNK = 2 * BLOCK
    triton_activations.ROWS, triton_activations.ROWS_OF_A_SUM = 2, 4
    right = measure(set(KERNELS), SIZES, tuple(DTYPES))
    wrong: dict[str, float] = {}  # in limits
    for kernel, words, *where in BUGS:
        with planted(*where):
            found = measure({kernel}, SIZES[3:], ("fp32", "bf16"))
        wrong[f"{kernel}: {words}"] = max(value[kernel] / LIMITS[case.split()[-1]] for case, value in found.items())
    losses = {"kernels": trained(by_kernels=True), "twins": trained(by_kernels=False)}
    json.dump(
        {
            "right": right, "far": compare_far_rows(), "hide_nan": kinds_that_hide_nan(), "planted": wrong,
            "trained": losses,
        },
        sys.stdout,
    )  # fmt: skip


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    main()
