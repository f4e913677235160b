"""Folders of Megatron-LM as data: tensors in pieces, and pickles that are programs."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import pytest
import torch

from lmtrain.errors import CheckpointError, DataError
from lmtrain.exchange.megatron.read_arguments_and_weights import open_megatron


def test_distributed_tensors_in_pieces(tmp_path: Path) -> None:
    """Two ranks' halves of one tensor, in two files, behind something else."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    value, chunks, places = torch.randn(4, 6), [], {}
    for rank in range(2):
        offset, half = torch.Size([2 * rank, 0]), value[2 * rank : 2 * rank + 2].clone()
        with open(tmp_path / f"__{rank}_0.distcp", "wb") as file:
            file.write(b"something else")
            torch.save(half, file)
            length = file.tell() - 14
        chunks.append(ChunkStorageMetadata(offset, half.shape))
        places[MetadataIndex("embedding.word_embeddings.weight", offset)] = _StorageInfo(
            f"__{rank}_0.distcp", 14, length
        )
    entry = TensorStorageMetadata(TensorProperties(torch.float32), value.shape, chunks)
    (tmp_path / ".metadata").write_bytes(
        pickle.dumps(Metadata({"embedding.word_embeddings.weight": entry}, storage_data=places))
    )
    torch.save({"args": argparse.Namespace()}, tmp_path / "common.pt")
    (part,) = open_megatron(tmp_path).weights["embedding.token.weight"]
    assert torch.equal(part.read(), value)
    entry.chunks.pop()
    (tmp_path / ".metadata").write_bytes(
        pickle.dumps(Metadata({"embedding.word_embeddings.weight": entry}, storage_data=places))
    )
    with pytest.raises(CheckpointError, match="is incomplete"):
        open_megatron(tmp_path)


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02]q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00K\x01s.",  # a key that takes forever to hash
        b"\x80\x04\x8e" + b"\xff" * 8 + b".",  # bytes without end
        b"\x80\x02" + b"(" * 100_000,
        b"\x80\x02\x82\x01.",  # the registry of extensions
        b"cos\nsystem\n0.",
        b"",
        b".",
    ],
)
def test_hostile_programs_end_in_an_error(program: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(DataError):
        open_megatron(tmp_path)
