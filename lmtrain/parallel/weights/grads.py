"""What stands between the last backward and the optimizer: partial sums, tied weights, the norm, clipping.

Over local fp32 gradients, whatever the layout. Called by ParallelModel.finish_gradients, and by apply.

Two weights may be one, on any layout. Nobody else says "tied"; five questions are answered here.

Is it the same object?  Where one module holds both names, yes (models/init.apply_ties). Stages hold a copy each.
Does it start equal?    A copy has the place of the first name, by which it is drawn or loaded (`copies`).
Does it stay equal?     Both get the sum of both gradients, bit for bit (`TiedSums`), and the same update.
Is it counted once?     A copy's place has another name than the copy: norms and sums leave it out.
Is it saved once?       No rank owns a copy (`copies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.observe.measure import phases
from lmtrain.parallel.collectives import all_reduce
from lmtrain.parallel.mesh import Axis, Mesh
from lmtrain.parallel.weights.precision import MasterWeights
from lmtrain.placement.places import Place
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.runtime.processes.process_group import new_group
from lmtrain.schedules.table import Kind
from lmtrain.spec import Split, Tie

if TYPE_CHECKING:
    from lmtrain.parallel.weights.sharding import ShardedWeights

Weights: TypeAlias = "MasterWeights | ShardedWeights"


def copies(ties: Iterable[Tie], held: Iterable[str], places: Mapping[str, Place]) -> dict[str, Place]:
    """Places of second names that a stage of this rank holds apart from the first."""
    names = set(held)
    return {tie.second: replace(places[tie.first], is_owner=False) for tie in ties if tie.second in names}


def is_copy(name: str, place: Place) -> bool:
    return place.name != name


class TiedSums:
    """The sum of both gradients of each tie, over the two ranks that hold its names.

    Each rank begins it as soon as its own gradient is whole, in a group that no message goes through: what other stages
    have yet to compute hides it. `sum_gradients` waits for it.
    """

    def __init__(
        self, ties: Sequence[Tie], mesh: Mesh, ends: tuple[int, int], weights: Weights, device: torch.device
    ) -> None:
        """Find the tied weights that this rank sums; `ends` are the pp ranks of the first and the last stage."""
        first, last = ends
        self.names: list[str] = []  # of this rank's gradients that are summed so
        self.whole: dict[str, Tensor] = {}
        self.under_way: list[tuple[dist.Work, Tensor]] = []
        if first == last or not ties:
            return
        two = tuple(sorted((mesh.pp.ranks[first], mesh.pp.ranks[last])))
        if mesh.rank in two:
            self.names = [tie.first if mesh.pp.index == first else tie.second for tie in ties]
        # because: a group's name counts the groups of its ranks, so those between the ends make one too, of themselves
        self.group = new_group(two if self.names else (mesh.rank,), mesh.timeout_s)
        self.pp, self.peer = mesh.pp, next(rank for rank in two if rank != mesh.rank)
        if self.names:
            # collective: of nothing, over the two ranks. because: at the first sum of a group NCCL holds the host until
            # both are there, and one would not get to send what the other still waits for
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        is_first = mesh.pp.index == first
        stage = 0 if is_first else mesh.layout.pp * mesh.layout.vp - 1
        for name in self.names:  # an embedding's gradient is never put off, a head's is a product
            weights.when_whole(name, stage, Kind.INPUT if is_first else Kind.WEIGHT, self.begin)

    @torch.no_grad()
    def begin(self, name: str, gradient: Tensor) -> None:
        """Begin the sum of a tied gradient that is complete on this rank; both ranks sum in the order of `names`."""
        self.whole[name] = gradient
        for name in self.names[len(self.under_way) :]:
            if name not in self.whole:
                return
            gradient = self.whole.pop(name)
            # collective: the gradient of a tied weight, over the two ranks that hold it, once a step
            work = dist.all_reduce(gradient, group=self.group, async_op=True)
            assert work is not None
            self.under_way.append((work, gradient))

    def wait(self) -> None:
        for work, gradient in self.under_way:
            began = phases.now(gradient)
            with phases.within("collective", "the gradient of a tied weight"):
                work.wait()
            phases.exchange(began, "the gradient of a tied weight", self.pp, gradient, self.peer, early=True)
        self.under_way.clear()


@torch.no_grad()
def sum_gradients(gradients: Mapping[str, Tensor], ties: Iterable[Tie], under_way: TiedSums) -> None:
    """Sum the gradients of tied weights in place."""
    under_way.wait()
    for tie in ties:
        one, other = gradients.get(tie.first), gradients.get(tie.second)
        if one is not None and other is not None:  # two stages of this rank
            other.copy_(one.add_(other))


@torch.no_grad()
def sum_partial_gradients(gradients: Mapping[str, Tensor], places: Mapping[str, Place], tp: Axis) -> None:
    """Sum in place the gradients of norms and biases that each rank used on its own part of the sequence."""
    partial = [gradient for name, gradient in gradients.items() if places[name].cut.split is Split.NONE]
    if tp.size == 1 or not partial:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial])
    # collective: gradients of weights that are not cut, over tp, once a step
    all_reduce(flat, tp, what="gradients of weights that are not cut")
    parts = torch.split(flat, [gradient.numel() for gradient in partial])
    torch._foreach_copy_(partial, [part.view_as(gradient) for part, gradient in zip(parts, partial, strict=True)])


@torch.no_grad()
def gradient_norm(
    gradients: Mapping[str, Tensor], places: Mapping[str, Place], world: Axis, device: torch.device | None = None
) -> Tensor:
    """Return the 2-norm of all gradients, each weight once, on the device, without synchronizing.

    One number that is not finite anywhere makes it so everywhere: all ranks skip an fp16 overflow, or none does.
    """
    fault_point("grad_reduce")
    if world.size == 1:
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients.values()))))
        return norm
    alike: dict[int, list[Tensor]] = {}
    for name, gradient in gradients.items():
        if not is_copy(name, places[name]):
            alike.setdefault(places[name].num_holders, []).append(gradient)
    squares = [torch.stack(torch._foreach_norm(group)).square().sum() / held for held, group in alike.items()]
    # a stage without a layer and without an end holds nothing
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    # collective: sums of squares over the world; what several ranks hold is divided among them
    return all_reduce(total, world, what="the gradient norm").sqrt()


@torch.no_grad()
def apply_clip(gradients: list[Tensor], norm: Tensor, clip_norm: float | None, loss_scale: float) -> None:
    """Take the loss scale out and clip to `clip_norm` in one multiplication. `norm` is that of the scaled gradients."""
    factor = clip_factor(norm, clip_norm, loss_scale)
    if factor is not None:
        torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def clip_factor(norm: Tensor, clip_norm: float | None, loss_scale: float) -> Tensor | None:
    """Return the factor for all gradients, on the device; None if there is none."""
    if clip_norm is None and loss_scale == 1.0:
        return None
    factor = torch.full_like(norm, 1.0 / loss_scale)
    if clip_norm is None:
        return factor
    # because: 1e-6 keeps a zero norm from dividing by zero; torch's own clipping uses the same
    return factor * (clip_norm / (norm / loss_scale + 1e-6)).clamp(max=1.0)
