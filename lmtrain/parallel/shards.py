"""Tensors and their places: first values for what a rank holds, and the pieces in which checkpoints hold it.

Called by apply. Works on anything shaped like a rank's shard of a parameter: the weight, its gradient, an optimizer's
slot.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor

from lmtrain.models.init import draw
from lmtrain.piece import Piece
from lmtrain.placement.places import Place, Region
from lmtrain.runtime.faults import fault_point
from lmtrain.spec import Start

Places = Mapping[str, Place]


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor], places: Places, starts: Mapping[str, Start] | None, seed: int) -> None:
    """Draw each whole parameter by its name and keep this rank's regions: a layout never changes a weight.

    All is 0 without `starts`. Padding starts at 0 and stays there: it gets no gradient.
    """
    fault_point("start.build")
    torch._foreach_zero_(list(parameters.values()))
    if starts is None:
        return
    for name, parameter in parameters.items():
        place = places[name]
        whole = draw(place.name, place.global_shape, starts[name], seed)
        for region in place.regions:
            parameter[region.local].copy_(whole[_slices(region)])


def pieces_of(tensors: Mapping[str, Tensor], places: Places, prefix: str) -> list[Piece]:
    """Every region that this rank holds; each key is, or ends in, a parameter's name.

    A piece has the name of its place: of two tied weights both are pieces of the first.
    """
    result = []
    for key, tensor in tensors.items():
        held, local = ending(key, places), tensor.detach()
        place, name = places[held], f"{prefix}.{key.removesuffix(held)}{places[held].name}"
        result += [Piece(name, place.global_shape, r.offset, local[r.local]) for r in place.regions]
    return result


def owned(pieces: Iterable[Piece], places: Places) -> list[Piece]:
    """Those that this rank saves: over all ranks, each number once."""
    held, saved = {place.name for place in places.values()}, {p.name for p in places.values() if p.is_owner}
    once = {(piece.name, piece.offset): piece for piece in pieces if ending(piece.name, held) in saved}
    return list(once.values())


def ending(key: str, names: Container[str]) -> str:
    """`optim.exp_avg.norm.weight` -> `norm.weight`: the longest ending that is a parameter."""
    name = key
    while name not in names:
        _, dot, name = name.partition(".")
        assert dot, f"{key} does not end in the name of a parameter"
    return name


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(region.offset, region.shape, strict=True))
