"""What the files of a checkpoint hold when each rank of a layout is to read only its own. Torch-free.

Called by `lmtrain reshard`, before the first byte moves. Numbers that several ranks hold (replicas, norms under tp, a
tied embedding under pp) lie once, in a file of those ranks alone; so no byte is written twice, and a rank opens only
files whose every number it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.checkpoint.described import layout_of
from lmtrain.checkpoint.disk.boxes import Box, whole
from lmtrain.checkpoint.disk.format import ITEM_BYTES, Manifest, TensorEntry, rank_file
from lmtrain.checkpoint.disk.tensor_file import PieceSpec
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.placement.stages import places_of_rank

Ranks = tuple[int, ...]


def files_of_layout(manifest: Manifest, model: ModelSettings, parallel: ParallelSettings) -> dict[str, list[PieceSpec]]:
    """Every tensor file with its pieces in order. Tensors that are no parameter's are held whole by every rank."""
    world = parallel.layout.world_size
    holders, everybody = _holders(model, parallel), tuple(range(world))
    held: dict[Ranks, list[PieceSpec]] = {}
    for name, tensor in manifest.tensors.items():
        for box, ranks in (_parameter(name, tensor, holders) or {whole(tensor.shape): everybody}).items():
            held.setdefault(ranks, []).append(PieceSpec(name, tensor.dtype, tensor.shape, box))
    names: dict[Ranks, str] = {}
    shared = dict.fromkeys(everybody, 0)
    for ranks in sorted(held):
        if len(ranks) == 1:
            names[ranks] = rank_file(ranks[0])
        else:
            names[ranks] = f"rank_{ranks[0]:05d}.shared_{shared[ranks[0]]}.safetensors"
            shared[ranks[0]] += 1
    # because: wide types first, so that every tensor begins at a multiple of its item size
    return {name: sorted(held[ranks], key=lambda s: -ITEM_BYTES[s.dtype]) for ranks, name in names.items()}


def state_at_layout(state: Mapping[str, Any], parallel: ParallelSettings) -> dict[str, Any]:
    """All that a run remembers; of its settings, those of parallelism become the new ones."""
    if layout_of(state) is None:
        return dict(state)
    return {**state, "settings": {**state["settings"], "parallel": parallel.to_dict()}}


def _holders(model: ModelSettings, parallel: ParallelSettings) -> dict[str, tuple[tuple[int, ...], dict[Box, Ranks]]]:
    """For each parameter its shape, and who holds which part of it."""
    found: dict[str, tuple[tuple[int, ...], dict[Box, Ranks]]] = {}
    for rank in range(parallel.layout.world_size):
        for place in places_of_rank(model, parallel, parallel.layout.coordinate(rank)).values():
            boxes = found.setdefault(place.name, (place.global_shape, {}))[1]
            for block in place.regions:
                box = Box(block.offset, block.shape)
                boxes[box] = (*boxes.get(box, ()), rank)
    return found


def _parameter(
    name: str, tensor: TensorEntry, holders: Mapping[str, tuple[tuple[int, ...], dict[Box, Ranks]]]
) -> dict[Box, Ranks] | None:
    """`optim.exp_avg.norm.weight` is held as `norm.weight` is."""
    rest = name
    while rest and rest not in holders:
        rest = rest.partition(".")[2]
    shape, boxes = holders.get(rest, (None, {}))
    return boxes if shape == tensor.shape else None
