"""Copies of a run's tensors in host memory, laid out as their file will be. Called by the writer between two steps.

Training waits for these copies only; hashing and writing come after, in the background. The memory is kept and used
again, and is pinned when tensors lie on a GPU, so that copies run at the full speed of the link. It can be made in
advance: the system takes longer to find a page than to fill it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lmtrain.checkpoint.disk.tensor_file import Array, RankData, array_bytes, file_order, spec_of
from lmtrain.piece import Piece

# because: torch's allocator of pinned memory rounds each request up to a power of two
CHUNK_BYTES = 64 << 20
_PAGE_BYTES = 4096


class HostMemory:
    """Room for one snapshot; taking the next one overwrites it."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Have room for these blocks, in pages that are really there."""
        num_bytes, pin = sum(_num_bytes(p.block) for p in pieces), bool(_devices(pieces))
        while len(self._chunks) * self._chunk_bytes < num_bytes:
            chunk = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pin)
            chunk[::_PAGE_BYTES] = 0
            self._chunks.append(chunk)

    def capture(self, pieces: Sequence[Piece]) -> RankData:
        """Copy every block; when this returns, the run may change its tensors."""
        self.reserve(pieces)
        ordered = file_order(pieces)
        position = 0
        for piece in ordered:
            position = self._append(_flat_bytes(piece.block), position)
        for device in _devices(pieces):
            torch.cuda.synchronize(device)  # sync: the copies have to arrive before the next update of the weights
        return RankData([spec_of(p) for p in ordered], list(self._parts(position)))

    def _append(self, source: Tensor, position: int) -> int:
        start = 0
        while start < len(source):
            chunk, at = divmod(position, self._chunk_bytes)
            count = min(len(source) - start, self._chunk_bytes - at)
            part = source if count == len(source) else source[start : start + count]
            self._chunks[chunk][at : at + count].copy_(part, non_blocking=True)
            start, position = start + count, position + count
        return position

    def _parts(self, num_bytes: int) -> Iterator[memoryview]:
        for i, chunk in enumerate(self._chunks):
            count = min(self._chunk_bytes, num_bytes - i * self._chunk_bytes)
            if count > 0:
                yield chunk.numpy()[:count].data


def _devices(pieces: Sequence[Piece]) -> set[torch.device]:
    return {p.block.device for p in pieces if isinstance(p.block, Tensor) and p.block.is_cuda}


def _num_bytes(block: Tensor | Array) -> int:
    return int(block.nbytes)


def _flat_bytes(block: Tensor | Array) -> Tensor:
    if isinstance(block, Tensor):
        return block.detach().contiguous().reshape(-1).view(torch.uint8)
    flat = array_bytes(block)
    # because: torch warns of arrays it may not write to, although it is only asked to read
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())
