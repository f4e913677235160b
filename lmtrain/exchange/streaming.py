"""Tensors from one format into another without ever holding a model: parts of bounded size, and safetensors files.

Called by the exchanges with Hugging Face and Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.boxes import whole
from lmtrain.checkpoint.disk.tensor_file import PieceSpec, encode_header
from lmtrain.errors import UsageError

PART_BYTES = 64 << 20  # of a tensor in memory at once
Report = Callable[[int, int], None]  # bytes done, bytes in all
TYPES = {"fp32": (torch.float32, "F32"), "bf16": (torch.bfloat16, "BF16"), "fp16": (torch.float16, "F16")}


def checked_type(word: str) -> tuple[torch.dtype, str]:
    if word not in TYPES:
        raise UsageError(f"--dtype={word} is no type to write. Use {', '.join(TYPES)}.")
    return TYPES[word]


def row_ranges(num_rows: int, row_bytes: int) -> Iterator[range]:
    """All rows in order, as many at a time as fit into a part."""
    step = max(1, PART_BYTES // max(1, row_bytes))
    for start in range(0, num_rows, step):
        yield range(start, min(start + step, num_rows))


def bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def spec(name: str, code: str, shape: tuple[int, ...]) -> PieceSpec:
    return PieceSpec(name, code, shape, whole(shape))


def write_tensors(path: Path, specs: list[PieceSpec], parts: Iterable[memoryview]) -> None:
    """A safetensors file of these tensors, whose bytes come in this order."""
    with open(path, "xb") as file:
        file.write(encode_header(specs))
        for part in parts:
            file.write(part)


def counted(parts: Iterable[memoryview], total: int, report: Report | None, done: int = 0) -> Iterator[memoryview]:
    """The same parts, told to whoever shows them as they go by."""
    for part in parts:
        yield part
        done += len(part)
        if report is not None:
            report(done, total)
