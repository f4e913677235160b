"""Initial values of a rank's tensors, and the pieces in which checkpoints store them.

Called by apply. Works on any tensor shaped like a rank's shard of a parameter: the weight, its gradient, an optimizer
slot.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

import torch
from torch import Tensor

from lmtrain.layout import Piece
from lmtrain.models.init import draw_parameter
from lmtrain.placement.places import Place, Region
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.spec import Start

Places = Mapping[str, Place]
Block = tuple[int, Tensor]  # (number of the first row, rows of a parameter)


@torch.no_grad()
def draw_initial_values(
    parameters: Mapping[str, Tensor], places: Places, starts: Mapping[str, Start] | None, seed: int
) -> None:
    """Fill this rank's parameters with their initial values.

    Each whole parameter is drawn by its name, and this rank's regions of it are kept, so that no layout changes a
    weight. Without `starts` all values are 0. Padding starts at 0 and stays at 0, because it gets no gradient.
    """
    fault_point("start.build")
    torch._foreach_zero_(list(parameters.values()))
    if starts is None:
        return
    blocks = {n: draw_parameter(places[n].name, places[n].global_shape, starts[n], seed) for n in parameters}
    for name, (first, block) in _draw_in_threads(blocks, torch.get_num_threads()):
        for region in places[name].regions:
            _copy_overlap(block, first, region, parameters[name])


def _draw_in_threads(blocks: Mapping[str, Iterator[Block]], num_threads: int) -> Iterator[tuple[str, Block]]:
    """Yield (name, block) with each name's blocks in order, drawn for several names at a time in threads.

    because: a thread draws about 250 million numbers per second from a generator, and each name has its own generator
    """
    if num_threads == 1:
        yield from ((name, block) for name, name_blocks in blocks.items() for block in name_blocks)
        return
    names = iter(blocks)
    in_flight: dict[Future[Block | None], str] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for name in islice(names, num_threads):
            in_flight[pool.submit(next, blocks[name], None)] = name
        while in_flight:
            for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                name, block = in_flight.pop(future), future.result()
                if block is not None:
                    yield name, block
                next_name = name if block is not None else next(names, None)
                if next_name is not None:
                    in_flight[pool.submit(next, blocks[next_name], None)] = next_name


def _copy_overlap(block: Tensor, first: int, region: Region, parameter: Tensor) -> None:
    """Copy the overlap of a region with the block of rows from `first` on into this rank's parameter."""
    start, size = region.offset[0], region.shape[0]
    begin, end = max(start, first), min(start + size, first + len(block))
    if begin < end:
        other_slices = tuple(slice(at, at + n) for at, n in zip(region.offset[1:], region.shape[1:], strict=True))
        values = block[(slice(begin - first, end - first), *other_slices)]
        parameter[region.local][begin - start : end - start].copy_(values)


def pieces_of(tensors: Mapping[str, Tensor], places: Places, prefix: str) -> list[Piece]:
    """Return every region that this rank holds of these tensors, as pieces named `prefix.NAME`.

    Each key is, or ends in, a parameter's name. A piece has its place's name: both copies of a tied weight are pieces
    of the first name.
    """
    result = []
    for key, tensor in tensors.items():
        parameter, local = parameter_name_of(key, places), tensor.detach()
        place, name = places[parameter], f"{prefix}.{key.removesuffix(parameter)}{places[parameter].name}"
        result += [Piece(name, place.global_shape, r.offset, local[r.local]) for r in place.regions]
    return result


def owned_pieces(pieces: Iterable[Piece], places: Places) -> list[Piece]:
    """Return the pieces that this rank saves. Every element of every tensor is saved by exactly one rank."""
    parameter_names, saved = {place.name for place in places.values()}, {p.name for p in places.values() if p.is_owner}
    owned = (piece for piece in pieces if parameter_name_of(piece.name, parameter_names) in saved)
    by_region = {(piece.name, piece.offset): piece for piece in owned}
    return list(by_region.values())


def parameter_name_of(key: str, names: Container[str]) -> str:
    """Return the longest ending of the key that is a parameter's name: `optim.exp_avg.norm.weight` -> `norm.weight`."""
    name = key
    while name not in names:
        _, dot, name = name.partition(".")
        assert dot, f"{key} does not end in the name of a parameter"
    return name
