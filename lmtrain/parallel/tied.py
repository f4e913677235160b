"""Two weights that are one, on any layout. Nobody else says "tied"; five questions are answered here.

Is it the same object?  Where one module holds both names, yes (models/init.apply_ties). Stages hold a copy each.
Does it start equal?    A copy has the place of the first name, by which it is drawn or loaded (`copies`).
Does it stay equal?     Both get the sum of both gradients, bit for bit (`sum_gradients`), and the same update.
Is it counted once?     A copy's place has another name than the copy: norms and sums leave it out (`is_copy`).
Is it saved once?       No rank owns a copy (`copies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.observe import phases
from lmtrain.parallel.mesh import Axis
from lmtrain.placement.places import Place
from lmtrain.spec import Tie


def copies(ties: Iterable[Tie], held: Iterable[str], places: Mapping[str, Place]) -> dict[str, Place]:
    """Places of second names that a stage of this rank holds apart from the first."""
    names = set(held)
    return {tie.second: replace(places[tie.first], is_owner=False) for tie in ties if tie.second in names}


def is_copy(name: str, place: Place) -> bool:
    return place.name != name


@torch.no_grad()
def sum_gradients(gradients: Mapping[str, Tensor], ties: Iterable[Tie], pp: Axis, ends: tuple[int, int]) -> None:
    """In place. `ends` are the ranks along `pp` of the first and the last stage, which hold the two names."""
    first, last = ends
    for tie in ties:
        one, other = gradients.get(tie.first), gradients.get(tie.second)
        if one is not None and other is not None:  # two stages of this rank
            other.copy_(one.add_(other))
        elif one is not None and first != last:
            one.add_(_exchange(one, pp.ranks[last], pp))
        elif other is not None and first != last:
            other.copy_(_exchange(other, pp.ranks[first], pp).add_(other))


def _exchange(mine: Tensor, peer: int, pp: Axis) -> Tensor:
    """The peer's tensor for mine, within the pipeline's group: no pair of ranks has a group of its own."""
    theirs = torch.empty_like(mine)
    both = [dist.P2POp(dist.isend, mine, peer, pp.group), dist.P2POp(dist.irecv, theirs, peer, pp.group)]
    with phases.within("collective", "the gradient of a tied weight"):
        for work in dist.batch_isend_irecv(both):
            work.wait()
    return theirs
