"""The predicted size of a manifest is its real size or slightly more."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import (
    SLACK_BYTES,
    FileEntry,
    Manifest,
    PieceEntry,
    blocks_file,
    encode_manifest,
    overhead_bytes,
    rank_file,
)
from lmtrain.checkpoint.disk.safetensors_file import PieceSpec, merge_pieces
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.errors import CheckpointError
from lmtrain.layout import Layout
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.placement.layers_and_shards_of_ranks import Shape, placements_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.plan.run_estimates import checkpoint_size
from lmtrain.plan.run_estimates.checkpoint_size import check_manifest_limits
from lmtrain.runtime.files.atomic_files import MAX_JSON_BYTES, MAX_JSON_MEMORY, json_memory

MODEL = GPTSettings(num_layers=4, width=64, num_heads=4, vocab_size=250, vocab_multiple=64, seq_len=32)


def two(name: str, shape: Shape) -> int:
    return 2


def manifest_of(parallel: ParallelSettings) -> Manifest:
    """As a run of AdamW at this layout would write it."""
    parts, files = [], dict[str, FileEntry]()
    for rank in range(parallel.layout.world_size):
        for place in placements_of_rank(MODEL, parallel, parallel.layout.coordinate(rank)).values():
            for region in place.regions if place.is_owner else ():
                for prefix in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
                    box = Box(region.offset, region.shape)
                    spec = PieceSpec(f"{prefix}.{place.name}", "F32", place.global_shape, box)
                    parts.append((spec, PieceEntry(rank_file(rank), spec.key, box)))
        files |= dict.fromkeys((rank_file(rank), blocks_file(rank_file(rank))), FileEntry(1 << 20, "a" * 64))
    return Manifest(12, files, merge_pieces([parts]), {})


@pytest.mark.parametrize("sizes", [{"dp_shard": 24}, {"dp_shard": 6, "tp": 4}, {"dp_replicate": 2, "dp_shard": 15}])
def test_it_is_as_large_as_the_layout_says(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]) -> None:
    parallel = ParallelSettings(**sizes)
    manifest = manifest_of(parallel)
    text = encode_manifest(manifest)
    need = max(len(text), json_memory(text) * MAX_JSON_BYTES // MAX_JSON_MEMORY)
    monkeypatch.setattr(checkpoint_size, "max_manifest_bytes", lambda data_bytes: need - 1)
    with pytest.raises(CheckpointError, match=r"would be too large to be read: it.* Save fewer pieces"):
        check_manifest_limits(MODEL, parallel.layout, two, 1 << 30)
    monkeypatch.setattr(
        checkpoint_size, "max_manifest_bytes", lambda data_bytes: int(1.03 * need) + 4 * checkpoint_size._STATE_BYTES
    )
    size = check_manifest_limits(MODEL, parallel.layout, two, 1 << 30)
    keys = [piece.key for tensor in manifest.tensors.values() for piece in tensor.pieces]
    reckoned = overhead_bytes(len(keys), sum(map(len, keys)), 1 << 30, parallel.layout.world_size)  # by the save
    assert reckoned <= size - (1 << 30) - SLACK_BYTES - checkpoint_size._STATE_BYTES < 1.03 * reckoned


def test_it_is_counted_before_anything_of_that_size_is_made() -> None:
    large = GPTSettings(num_layers=96, width=12288, num_heads=96, vocab_size=50257, seq_len=32)
    with pytest.raises(CheckpointError, match="would hold 14,193,198 pieces of tensors; at most 1,000,000 are allowed"):
        check_manifest_limits(large, Layout(dp_shard=4096), two, 1 << 40)
    check_manifest_limits(large, Layout(dp_shard=32, tp=8, dp_replicate=32), two, 1 << 40)


def test_pieces_of_small_tensors_are_bounded_by_the_room_that_they_leave() -> None:
    wide = GPTSettings(num_layers=96, width=1024, num_heads=16, vocab_size=50257, seq_len=32)
    check_manifest_limits(wide, Layout(dp_shard=64), two, 1 << 32)
    with pytest.raises(CheckpointError, match="would be too large to be read: it"):
        check_manifest_limits(wide, Layout(dp_shard=256), two, 1 << 32)
