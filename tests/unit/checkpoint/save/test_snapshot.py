"""Snapshots: the bytes of the file, in memory that is used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.checkpoint.save.background_writer import HostMemory
from lmtrain.layout import Piece


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
def test_blocks_are_laid_out_in_a_row_whatever_the_chunks(chunk_bytes: int) -> None:
    base = torch.arange(40, dtype=torch.int16).reshape(5, 8)
    blocks: dict[str, Any] = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "matrix": base.t(),
        "array": np.arange(6.0).reshape(2, 3).T,
    }
    pieces = [Piece(name, tuple(b.shape), (0,) * b.ndim, b) for name, b in blocks.items()]
    data = HostMemory(chunk_bytes).capture(pieces)
    assert [spec.name for spec in data.specs] == ["array", "matrix", "bytes"]
    expected = b"".join(np.ascontiguousarray(blocks[spec.name]).tobytes() for spec in data.specs)
    assert b"".join(data.parts) == expected
    assert data.num_bytes == len(expected)


def test_memory_is_used_again() -> None:
    memory = HostMemory(64)
    block = torch.arange(100, dtype=torch.float32)
    first = memory.capture([Piece("w", (100,), (0,), block)])
    chunks = list(memory._chunks)
    block.mul_(2)
    second = memory.capture([Piece("w", (100,), (0,), block)])
    assert [a is b for a, b in zip(chunks, memory._chunks, strict=True)] == [True] * len(chunks)
    assert b"".join(second.parts) == block.numpy().tobytes() == b"".join(first.parts)


def test_weights_that_need_gradients_and_read_only_arrays_are_taken() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    array = np.ones(3, np.int32)
    array.flags.writeable = False
    data = HostMemory().capture([Piece("w", (2, 3), (0, 0), weight), Piece("a", (3,), (0,), array)])
    assert b"".join(data.parts) == np.ones(6, np.float32).tobytes() + array.tobytes()
