"""The size of a run's checkpoints and manifests, computed from its layout before the run starts. Torch-free.

Called by preflight and by the search for layouts. If a layout passes, no save of its run is refused for the number of
pieces or the size of the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lmtrain.checkpoint.disk.checkpoint_format import (
    FEWER_PIECES,
    SLACK_BYTES,
    FileEntry,
    PieceEntry,
    TensorEntry,
    blocks_file,
    check_num_pieces,
    manifest_line,
    max_manifest_bytes,
    overhead_bytes,
    rank_file,
)
from lmtrain.checkpoint.disk.safetensors_file import PieceSpec
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.errors import CheckpointError
from lmtrain.layout import Layout
from lmtrain.models.model_settings import ModelSettings, unpadded_shapes
from lmtrain.placement.layers_and_shards_of_ranks import Shape, num_saved_regions, saved_regions
from lmtrain.runtime.files.atomic_files import json_memory, size_problem
from lmtrain.spec import Cut, Split

_SLOT_PREFIX = "optim.exp_avg_sq."  # because: no optimizer here gives a slot a longer name; an average is `ema.NAME`
_STATE_BYTES = 64 << 10  # bytes allowed for the run's state, which takes about 10 kB
_STATE_MEMORY = 20 * _STATE_BYTES
_LARGEST_FILE = FileEntry(10**15, "0" * 64)
_FP32_BYTES = 4
OptimizerTensorCounter = Callable[
    [str, Shape], int
]  # (name, shape) of a weight -> how many tensors of its shape the optimizer keeps
Kind = tuple[Shape, Cut, Shape]  # of weights: the padded shape, the cut, the shape without the vocabulary's padding


def count_saved_tensors(num_slots: OptimizerTensorCounter, *, keeps_average: bool) -> OptimizerTensorCounter:
    """Return a function like `num_slots`, the number of tensors that the optimizer keeps for a weight, that also counts
    the weight's average if the run keeps one.
    """
    return lambda name, shape: num_slots(name, shape) + keeps_average


def checkpoint_bytes(model: ModelSettings, num_slots: OptimizerTensorCounter) -> int:
    """Return the bytes of all tensors in a checkpoint of the model: weights and optimizer tensors in fp32.
    `num_slots(name, shape)` returns how many optimizer tensors, such as moments, belong to a weight.
    """
    return sum(
        _FP32_BYTES * math.prod(shape) * (1 + num_slots(name, shape)) for name, shape in unpadded_shapes(model).items()
    )


def check_manifest_limits(
    model: ModelSettings, layout: Layout, num_slots: OptimizerTensorCounter, data_bytes: int
) -> int:
    """Return the estimated bytes of a whole checkpoint that a run with this layout saves, of which `data_bytes` are
    tensors. Raise CheckpointError if its tensors would be saved in too many pieces or its manifest (index file) would
    be too large. `num_slots(name, shape)` returns how many optimizer tensors belong to a weight.

    Files that the run adds are not counted. The result depends only on dp_shard, tp and the number of processes.
    """
    shapes, cuts, vocab_size = model.weights(), model.cuts(), model.shape.vocab_size
    names: dict[Kind, list[str]] = {}  # because: all blocks of a model are cut alike, so each kind is computed once
    for name, shape in unpadded_shapes(model).items():
        kind = names.setdefault((shapes[name], cuts.get(name, Cut(Split.NONE)), shape), [])
        kind += [f"model.{name}"] + [f"{_SLOT_PREFIX}{name}"] * num_slots(name, shape)
    check_num_pieces(sum(
        len(same_kind) * num_saved_regions(shape, cut, layout, vocab_size)
        for (shape, cut, _), same_kind in names.items()
    ))  # fmt: skip
    file = rank_file(layout.world_size - 1)
    file_lines = "".join(manifest_line(name, _LARGEST_FILE) for name in (file, blocks_file(file)))
    num_pieces = num_letters = 0
    num_bytes, memory = (
        _STATE_BYTES + len(file_lines) * layout.world_size,
        _STATE_MEMORY + json_memory(file_lines) * layout.world_size,
    )
    for (padded, cut, shape), same_kind in names.items():
        boxes = [Box(region.offset, region.shape) for region in saved_regions(padded, cut, layout, vocab_size)]
        pieces = tuple(PieceEntry(file, PieceSpec(same_kind[0], "F32", shape, box).key, box) for box in boxes)
        line = manifest_line(same_kind[0], TensorEntry("F32", shape, pieces))
        extra_letters = sum(len(name) - len(same_kind[0]) for name in same_kind) * (1 + len(pieces))
        num_pieces += len(same_kind) * len(pieces)
        num_letters += len(same_kind) * sum(len(piece.key) for piece in pieces) + extra_letters
        num_bytes += len(same_kind) * len(line) + extra_letters
        memory += len(same_kind) * json_memory(line) + extra_letters
    if reason := size_problem(num_bytes, memory, max_manifest_bytes(data_bytes)):
        raise CheckpointError(f"The manifest of a checkpoint would be too large to be read: {reason}. {FEWER_PIECES}")
    other_bytes = overhead_bytes(num_pieces, num_letters, data_bytes, layout.world_size)
    return data_bytes + other_bytes + _STATE_BYTES + SLACK_BYTES
