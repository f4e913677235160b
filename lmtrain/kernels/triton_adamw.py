"""The Triton kernel of adamw.py: a launch over many tensors, located by their addresses.

Imported only on a GPU machine.

because: a model has hundreds of tensors, and a launch per tensor would take the host longer than the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lmtrain.kernels.adamw_tensors_and_rates import AdamWTensors, Rates

BLOCK = 1024
CHUNK = 16 * BLOCK  # elements of a tensor that a program processes
NUM_WARPS = 4
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def step(
    entries: Sequence[AdamWTensors], rates: Rates, gradient_factor: Tensor | None, *, as_directions: bool = False
) -> None:
    """Run an AdamW step in place for each weight in `entries`, by a Triton kernel, as adamw.step does. If
    `as_directions`, overwrite the weights with Adam's directions instead, as adamw.write_directions does.

    A kernel is launched for each combination of `compute_copy` dtype and alignment: usually one or two launches.
    """
    kinds: dict[tuple[torch.dtype | None, int], list[AdamWTensors]] = defaultdict(list)
    for entry in entries:
        assert all(x is None or (x.is_contiguous() and x.shape == entry.weight.shape) for x in entry.tensors)
        assert all(x.dtype is torch.float32 for x in entry.tensors[:4] if x is not None)
        copy_dtype = None if entry.compute_copy is None else entry.compute_copy.dtype
        kinds[copy_dtype, entry.alignment].append(entry)
    for (copy_dtype, alignment), group in kinds.items():
        _launch(group, rates, gradient_factor, copy_dtype, alignment, as_directions)


def _launch(
    entries: list[AdamWTensors], rates: Rates, gradient_factor: Tensor | None, copy_dtype: torch.dtype | None,
    alignment: int, as_directions: bool,
) -> None:  # fmt: skip
    """Launch the AdamW kernel once over all weights in `entries`. Their half-precision copies all have the dtype
    `copy_dtype` (None: there are no copies). Their addresses in bytes and their numbers of elements are multiples of
    `alignment`.
    """
    device = entries[0].weight.device
    tensor_of, start_of, size_of = _split_into_chunks(tuple(entry.weight.numel() for entry in entries), CHUNK, device)
    if not len(tensor_of):
        return
    first, second = rates.betas
    addresses = torch.tensor([entry.addresses for entry in entries], device="cpu")
    _adamw_step[(len(tensor_of),)](
        _copy_to_device(addresses, device), tensor_of, start_of, size_of, gradient_factor,
        rates.decay_factor, rates.step_size, rates.root_correction, rates.eps, first, 1.0 - first, second, 1.0 - second,
        HAS_FACTOR=gradient_factor is not None, ROUNDED=None if copy_dtype is None else _DTYPES[copy_dtype],
        DIRECTS=as_directions, DIVISOR=alignment, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=NUM_WARPS,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _split_into_chunks(sizes: tuple[int, ...], chunk: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Divide tensors with these numbers of elements into chunks of at most `chunk` elements, one for each program of a
    Triton kernel. Return three int64 tensors on the device: the number of each program's tensor, the index of its
    chunk's first element in that tensor, and the number of elements of each tensor.
    """
    counts = [-(-size // chunk) for size in sizes]
    tensor_of = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    start_of = np.concatenate([np.arange(count, dtype=np.int64) * chunk for count in counts])
    arrays = (tensor_of, start_of, np.array(sizes, np.int64))
    tensors, starts, lengths = (_copy_to_device(torch.from_numpy(array), device) for array in arrays)
    return tensors, starts, lengths


def _copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    # because: a copy from unpinned memory synchronizes with the device
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@triton.jit
def _adamw_step(
    addresses, tensor_of, start_of, size_of, factor,
    kept, step_size, root, eps, beta1, rest1, beta2, rest2,
    HAS_FACTOR: tl.constexpr, ROUNDED: tl.constexpr, DIRECTS: tl.constexpr, DIVISOR: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(tensor_of + tl.program_id(0))
    start = tl.multiple_of(tl.load(start_of + tl.program_id(0)), BLOCK)
    size = tl.multiple_of(tl.load(size_of + tensor), DIVISOR)
    table = addresses + tensor * 5
    weights = tl.multiple_of(tl.load(table).to(tl.pointer_type(tl.float32)), DIVISOR)
    gradients = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(tl.float32)), DIVISOR)
    firsts = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(tl.float32)), DIVISOR)
    seconds = tl.multiple_of(tl.load(table + 3).to(tl.pointer_type(tl.float32)), DIVISOR)
    scale = 1.0
    if HAS_FACTOR:
        scale = tl.load(factor)
    for offset in range(0, CHUNK, BLOCK):
        at = start + offset + tl.arange(0, BLOCK)
        inside = at < size
        gradient = tl.load(gradients + at, mask=inside, other=0.0) * scale
        first = beta1 * tl.load(firsts + at, mask=inside, other=0.0) + rest1 * gradient
        second = beta2 * tl.load(seconds + at, mask=inside, other=0.0) + rest2 * gradient * gradient
        weight = step_size * first / (tl.sqrt(second) / root + eps)
        if not DIRECTS:
            weight = kept * tl.load(weights + at, mask=inside, other=0.0) - weight
        tl.store(firsts + at, first, mask=inside)
        tl.store(seconds + at, second, mask=inside)
        tl.store(weights + at, weight, mask=inside)
        if ROUNDED is not None:
            copies = tl.multiple_of(tl.load(table + 4).to(tl.pointer_type(ROUNDED)), DIVISOR)
            tl.store(copies + at, weight.to(ROUNDED), mask=inside)
