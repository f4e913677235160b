"""Initial values of a rank's tensors, and the pieces in which checkpoints store them.

Called by build_parallel and ParallelModel. Works on any tensor shaped like a rank's shard of a parameter: the weight,
its gradient, an optimizer slot.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice

import torch
from torch import Tensor

from lmtrain.layout import Piece
from lmtrain.models.initial_weights import draw_parameter
from lmtrain.placement.layers_and_shards_of_ranks import Placement, Region
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.spec import Start

Placements = Mapping[str, Placement]
RowBlock = tuple[int, Tensor]  # (number of the first row, rows of a parameter)


@torch.no_grad()
def draw_initial_values(
    parameters: Mapping[str, Tensor], placements: Placements, starts: Mapping[str, Start] | None, seed: int
) -> None:
    """Overwrite this rank's parameters, in place, with their initial values, drawn from `seed` and each parameter's
    name. `starts` maps each name to its distribution (None: all values are 0); `placements` maps it to the regions of
    the whole parameter that this rank holds.

    Each whole parameter is drawn and this rank's regions of it are kept, so that no layout changes a weight. Padding
    starts at 0 and stays at 0, because it gets no gradient.
    """
    fault_point("start.build")
    torch._foreach_zero_(list(parameters.values()))
    if starts is None:
        return
    blocks = {n: draw_parameter(placements[n].name, placements[n].global_shape, starts[n], seed) for n in parameters}
    for name, (first, block) in _draw_in_threads(blocks, torch.get_num_threads()):
        for region in placements[name].regions:
            _copy_overlap(block, first, region, parameters[name])


def _draw_in_threads(blocks: Mapping[str, Iterator[RowBlock]], num_threads: int) -> Iterator[tuple[str, RowBlock]]:
    """Yield (parameter name, block of its rows) from `blocks`, an iterator of blocks for each name. Threads draw
    several parameters at a time; the blocks of a parameter come in order.

    because: a thread draws about 250 million numbers per second from a generator, and each name has its own generator
    """
    if num_threads == 1:
        yield from ((name, block) for name, name_blocks in blocks.items() for block in name_blocks)
        return
    names = iter(blocks)
    in_flight: dict[Future[RowBlock | None], str] = {}
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


def _copy_overlap(block: Tensor, first_row: int, region: Region, parameter: Tensor) -> None:
    """Copy the values of `block` that lie in `region` to their place in this rank's `parameter`. `block` holds rows of
    the whole parameter, the first of which is row `first_row`; `region` is a rectangle of it that this rank holds.
    """
    start, size = region.offset[0], region.shape[0]
    begin, end = max(start, first_row), min(start + size, first_row + len(block))
    if begin < end:
        other_slices = tuple(slice(at, at + n) for at, n in zip(region.offset[1:], region.shape[1:], strict=True))
        values = block[(slice(begin - first_row, end - first_row), *other_slices)]
        parameter[region.local][begin - start : end - start].copy_(values)


def pieces_of(tensors: Mapping[str, Tensor], placements: Placements, prefix: str) -> list[Piece]:
    """Return a checkpoint Piece (name, offset and values) for each rectangular region of the tensors that this rank
    holds, named `prefix.NAME`. `tensors` are named after parameters: each key is, or ends in, a parameter's name.
    `placements` maps parameter names to the regions on this rank.

    A piece has its placement's name: both copies of a tied weight are pieces of the first name.
    """
    result = []
    for key, tensor in tensors.items():
        parameter, local = parameter_name_of(key, placements), tensor.detach()
        placement, name = placements[parameter], f"{prefix}.{key.removesuffix(parameter)}{placements[parameter].name}"
        result += [Piece(name, placement.global_shape, r.offset, local[r.local]) for r in placement.regions]
    return result


def owned_pieces(pieces: Iterable[Piece], placements: Placements) -> list[Piece]:
    """Return those of `pieces` that this rank must save: regions of parameters that it owns by `placements`. Over all
    ranks, every element of every tensor is saved exactly once.
    """
    names = {place.name for place in placements.values()}
    saved = {
        (place.name, region.offset)
        for place in placements.values() if place.is_owner
        for region in place.regions if region.local[0].start < place.counted_rows
    }
    owned = (piece for piece in pieces if (parameter_name_of(piece.name, names), piece.offset) in saved)
    return list({(piece.name, piece.offset): piece for piece in owned}.values())


def parameter_name_of(key: str, names: Container[str]) -> str:
    """Return the longest suffix of `key` that is in `names`, the parameter names: `optim.exp_avg.norm.weight` ->
    `norm.weight`.
    """
    name = key
    while name not in names:
        _, dot, name = name.partition(".")
        assert dot, f"{key} does not end in the name of a parameter"
    return name
