"""Tensors from one format into another without ever holding a model: parts of bounded size, and safetensors files.

Called by the exchanges with Hugging Face and Megatron-LM. Every file is written under a folder that takes its name only
when all is on disk and found right.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.boxes import whole
from lmtrain.checkpoint.disk.tensor_file import BlockSpec, encode_header
from lmtrain.errors import OutputError, UsageError
from lmtrain.runtime.files import fsync_dir, storage_errors

PART_BYTES = 64 << 20  # of a tensor in memory at once
Progress = Callable[[int, int], None]  # bytes done, bytes in all
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


def spec(name: str, code: str, shape: tuple[int, ...]) -> BlockSpec:
    return BlockSpec(name, code, shape, whole(shape))


def write_tensors(path: Path, specs: list[BlockSpec], parts: Iterable[memoryview]) -> None:
    """A safetensors file of these tensors, whose bytes come in this order."""
    with open(path, "xb") as file:
        file.write(encode_header(specs))
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` on leaving; gone again where that fails. `path` must not hold anything."""
    with storage_errors(path, "Writing"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise OutputError(f"{path} exists and is not empty. Choose a new --output, or remove it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        attempt = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        shutil.rmtree(attempt, ignore_errors=True)
        attempt.mkdir()
        try:
            yield attempt
            fsync_dir(attempt)
            if path.exists():
                path.rmdir()
            os.rename(attempt, path)
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)
            raise
        fsync_dir(path.parent)


def counted(parts: Iterable[memoryview], total: int, progress: Progress | None, done: int = 0) -> Iterator[memoryview]:
    """The same parts, told to whoever shows them as they go by."""
    for part in parts:
        yield part
        done += len(part)
        if progress is not None:
            progress(done, total)
