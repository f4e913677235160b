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
def fill(parameters: Mapping[str, Tensor], places: Places, starts: Mapping[str, Start] | None, seed: int) -> None:
    """Draw each whole parameter by its name and keep this rank's regions, so that a layout never changes a weight.

    Without `starts` all values are 0. Padding starts at 0 and stays at 0, because it gets no gradient.
    """
    fault_point("start.build")
    torch._foreach_zero_(list(parameters.values()))
    if starts is None:
        return
    blocks = {n: draw_parameter(places[n].name, places[n].global_shape, starts[n], seed) for n in parameters}
    for name, (first, block) in _in_turn(blocks, torch.get_num_threads()):
        for region in places[name].regions:
            _keep(block, first, region, parameters[name])


def _in_turn(blocks: Mapping[str, Iterator[Block]], num_threads: int) -> Iterator[tuple[str, Block]]:
    """Yield each name's blocks in order, drawn for several names at a time in threads.

    because: a thread draws about 250 million numbers per second from a generator, and each name has its own generator
    """
    if num_threads == 1:
        yield from ((name, block) for name, its in blocks.items() for block in its)
        return
    names = iter(blocks)
    flying: dict[Future[Block | None], str] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for name in islice(names, num_threads):
            flying[pool.submit(next, blocks[name], None)] = name
        while flying:
            for one in wait(flying, return_when=FIRST_COMPLETED).done:
                name, block = flying.pop(one), one.result()
                if block is not None:
                    yield name, block
                following = name if block is not None else next(names, None)
                if following is not None:
                    flying[pool.submit(next, blocks[following], None)] = following


def _keep(block: Tensor, first: int, region: Region, parameter: Tensor) -> None:
    """Copy the overlap of a region with the block of rows from `first` on into this rank's parameter."""
    start, size = region.offset[0], region.shape[0]
    begin, end = max(start, first), min(start + size, first + len(block))
    if begin < end:
        others = tuple(slice(at, at + n) for at, n in zip(region.offset[1:], region.shape[1:], strict=True))
        parameter[region.local][begin - start : end - start].copy_(block[(slice(begin - first, end - first), *others)])


def pieces_of(tensors: Mapping[str, Tensor], places: Places, prefix: str) -> list[Piece]:
    """Return every region that this rank holds; each key is, or ends in, a parameter's name.

    A piece has its place's name: both copies of a tied weight are pieces of the first name.
    """
    result = []
    for key, tensor in tensors.items():
        held, local = ending(key, places), tensor.detach()
        place, name = places[held], f"{prefix}.{key.removesuffix(held)}{places[held].name}"
        result += [Piece(name, place.global_shape, r.offset, local[r.local]) for r in place.regions]
    return result


def owned(pieces: Iterable[Piece], places: Places) -> list[Piece]:
    """Return the pieces this rank saves. Every element of every tensor is saved by exactly one rank."""
    held, saved = {place.name for place in places.values()}, {p.name for p in places.values() if p.is_owner}
    once = {(piece.name, piece.offset): piece for piece in pieces if ending(piece.name, held) in saved}
    return list(once.values())


def ending(key: str, names: Container[str]) -> str:
    """Return the longest ending of the key that is a parameter's name: `optim.exp_avg.norm.weight` -> `norm.weight`."""
    name = key
    while name not in names:
        _, dot, name = name.partition(".")
        assert dot, f"{key} does not end in the name of a parameter"
    return name
