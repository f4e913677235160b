"""A folder read straight into any rank's share of a model gives what a checkpoint imported from it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmtrain.checkpoint.read_verified_contents import checked_model
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.exchange import stream_tensors_to_disk
from lmtrain.exchange.huggingface.import_and_export import HFWeights, export_hf, import_hf
from lmtrain.models.model_settings import ModelSettings
from lmtrain.parallel.initialize_and_save_shards import pieces_of
from lmtrain.placement.layers_and_shards_of_ranks import placements_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from tests.marks import wide
from tests.unit.exchange.models import bert, gpt2, llama, save

MODELS: dict[str, ModelSettings] = {"gpt2": gpt2(), "llama": llama(), "bert": bert()}


@pytest.mark.parametrize("dtype", [torch.float32, *wide(torch.bfloat16)])
@pytest.mark.parametrize("model", MODELS)
def test_each_rank_reads_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(stream_tensors_to_disk, "PART_BYTES", 1000)  # a few rows at a time
    export_hf(save(tmp_path / "run", MODELS[model]), tmp_path / "hf", check=False)
    imported = CheckpointReader(import_hf(tmp_path / "hf", tmp_path / "back")["checkpoint"])
    weights = HFWeights(tmp_path / "hf")
    assert weights.settings == checked_model(imported)
    parallel = ParallelSettings(pp=2, tp=2, dp_shard=3, zero=3)
    for rank in range(parallel.layout.world_size):
        places = placements_of_rank(weights.settings, parallel, parallel.layout.coordinate(rank))
        pieces = pieces_of(
            {name: torch.full(p.local_shape, 7.0).to(dtype) for name, p in places.items()}, places, "model"
        )
        weights.load_into(pieces)
        for piece in pieces:
            expected = imported.read(piece.name, piece.offset, piece.block.shape).to(dtype)
            assert torch.equal(piece.block, expected), piece.name
