"""The steps between the last backward and the optimizer: partial sums, tied weights, norm, clipping.

Works on local fp32 gradients of any layout. Called by ParallelModel.finish_gradients, and by build_parallel.

On any layout two parameter names may share a weight. Ties are handled only here; the file answers five questions.

Is it the same object?  Yes if a module holds both names (models/initial_weights.apply_ties). Stages hold a copy each.
Does it start equal?    A copy has the placement of the first name, by which it is drawn or loaded (`tied_copies`).
Does it stay equal?     Both get the sum of both gradients, bit for bit (`TiedSums`), and the same update.
Is it counted once?     A copy's placement has another name than the copy, so norms and sums skip it.
Is it saved once?       No rank owns a copy (`tied_copies`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.kernels.vector_norms import vector_norms
from lmtrain.parallel.mesh import Axis, Mesh
from lmtrain.parallel.tp_linears_and_collectives import all_reduce
from lmtrain.parallel.weights.master_weights import MasterWeights
from lmtrain.placement.layers_and_shards_of_ranks import Placement
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.fault_injection import fault_point
from lmtrain.runtime.processes.process_group import new_group
from lmtrain.schedules.table import Kind
from lmtrain.spec import Split, Tie

if TYPE_CHECKING:
    from lmtrain.parallel.weights.fsdp_sharding import ShardedWeights

Weights: TypeAlias = "MasterWeights | ShardedWeights"


def tied_copies(
    ties: Iterable[Tie], held_names: Iterable[str], placements: Mapping[str, Placement]
) -> dict[str, Placement]:
    """Return, by the copy's name, the placements of tied weights that this rank holds as a separate copy, because
    embedding and head are on two stages. `held_names` are the names of this rank's parameters.
    """
    names = set(held_names)
    return {tie.second: replace(placements[tie.first], is_owner=False) for tie in ties if tie.second in names}


def is_copy(name: str, placement: Placement) -> bool:
    """Return True if this name is a copy of a tied weight."""
    return placement.name != name


class TiedSums:
    """The sums of tied weights' gradients over the two ranks that hold a copy each.

    Each rank starts the sum as soon as its own gradient is complete, in a group without other messages, so that the sum
    overlaps the remaining compute of other stages. `sum_tied_gradients` waits for it.
    """

    def __init__(
        self, ties: Sequence[Tie], mesh: Mesh, end_ranks: tuple[int, int], weights: Weights, device: torch.device
    ) -> None:
        """Create the group. `end_ranks` are the pp ranks of the first and last stage. Collective over the pipeline."""
        first, last = end_ranks
        self.names: list[str] = []  # names of this rank's gradients that are summed
        self.complete: dict[str, Tensor] = {}
        self.in_flight: list[tuple[dist.Work, Tensor]] = []
        if first == last or not ties:
            return
        both_ranks = tuple(sorted((mesh.pp.ranks[first], mesh.pp.ranks[last])))
        if mesh.rank in both_ranks:
            self.names = [tie.first if mesh.pp.index == first else tie.second for tie in ties]
        # because: torch numbers groups per rank for their names, so ranks between the ends must create a group as well
        self.group = new_group(both_ranks if self.names else (mesh.rank,), mesh.timeout_s)
        self.pp, self.peer = mesh.pp, next(rank for rank in both_ranks if rank != mesh.rank)
        if self.names:
            # collective: sums a zero over the two ranks. because: at a group's first sum NCCL blocks the host until
            # both ranks take part, and a blocked rank could not send a message for which the other waits
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
        is_first = mesh.pp.index == first
        stage = 0 if is_first else mesh.layout.pp * mesh.layout.vp - 1
        for name in self.names:  # an embedding's gradient is never deferred, a head's is a product and may be
            weights.on_complete_gradient(name, stage, Kind.INPUT if is_first else Kind.WEIGHT, self.start)

    @torch.no_grad()
    def start(self, name: str, gradient: Tensor) -> None:
        """Record that this rank's gradient of the tied weight `name` is complete, and start its sum over the two ranks
        with a copy. Both ranks sum in the order of `names`, so a sum may first wait for the gradients of earlier names.
        """
        self.complete[name] = gradient
        for name in self.names[len(self.in_flight) :]:
            if name not in self.complete:
                return
            gradient = self.complete.pop(name)
            # collective: sums a tied weight's gradient over the two ranks that hold it, once per step
            work = dist.all_reduce(gradient, group=self.group, async_op=True)
            assert work is not None
            self.in_flight.append((work, gradient))

    def wait(self) -> None:
        """Wait until all sums that `start` has started are complete."""
        for work, gradient in self.in_flight:
            began = current_phase.span_start(gradient)
            with current_phase.within("collective", "the gradient of a tied weight"):
                work.wait()
            current_phase.record_collective(
                began, "the gradient of a tied weight", self.pp, gradient, self.peer, early=True
            )
        self.in_flight.clear()


@torch.no_grad()
def sum_tied_gradients(gradients: Mapping[str, Tensor], ties: Iterable[Tie], tied_sums: TiedSums) -> None:
    """Give both names of each tied weight, in place, the sum of the gradients under both. `gradients` holds this rank's
    gradients by name. If the two names are on two ranks, `tied_sums` has started the sum already, and this waits for
    it.
    """
    tied_sums.wait()
    for tie in ties:
        first, second = gradients.get(tie.first), gradients.get(tie.second)
        if first is not None and second is not None:  # both names are on stages of this rank
            second.copy_(first.add_(second))


@torch.no_grad()
def sum_partial_gradients(
    gradients: Mapping[str, Tensor], placements: Mapping[str, Placement], tp: Axis, *, sequence_parallel: bool
) -> None:
    """Sum over the ranks of `tp`, in place, those gradients of unsplit weights that are partial on each rank: of
    weights that each rank uses for its own heads alone and, with `sequence_parallel`, of all unsplit weights, such as
    norms and biases, since each rank has only its shard of the sequence. All ranks of `tp` must call this.
    """
    cuts = {name: placements[name].cut for name in gradients}
    partial = [
        gradients[name]
        for name, cut in cuts.items() if cut.split is Split.NONE and (sequence_parallel or cut.partial)
    ]
    if tp.size == 1 or not partial:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial])
    # collective: sums the gradients of uncut weights over tp, once per step
    all_reduce(flat, tp, wait_name="gradients of weights that are not cut")
    _copy_back(flat, partial)


@torch.no_grad()
def sum_copied_gradients(gradients: Mapping[str, Tensor], placements: Mapping[str, Placement], tp: Axis) -> None:
    """Sum, in place, the gradients of weight rows of which several tensor-parallel ranks hold a copy: those of keys and
    values, if there are fewer key-value heads than ranks. Before, each rank has the gradient from its own queries
    alone. All ranks of `tp` must call this.
    """
    copied = {name: gradient for name, gradient in gradients.items() if placements[name].num_sharing > 1}
    if not copied:
        return
    num_sharing = next(placements[name].num_sharing for name in copied)
    tails = [gradient[placements[name].copied_rows.start :] for name, gradient in copied.items()]
    own = torch.cat([tail.flatten() for tail in tails])
    # because: the ranks with the same rows follow each other, and one sum over tp needs no further group of ranks
    by_head = own.new_zeros(tp.size // num_sharing, len(own))
    by_head[tp.index // num_sharing] = own
    # collective: sums the gradients of copied keys and values over tp, once per step
    all_reduce(by_head, tp, wait_name="gradients of copied keys and values")
    _copy_back(by_head[tp.index // num_sharing], tails)


def _copy_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy the numbers of `flat` to the tensors, one after the other."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


@torch.no_grad()
def gradient_norm(
    gradients: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    world: Axis,
    device: torch.device | None = None,
) -> Tensor:
    """Return the 2-norm of the whole model's gradient, on the device without synchronization. A weight that several
    ranks or names share counts once, by `placements`. `device` is needed only on ranks without any gradient.

    Collective over the world. A non-finite value on any rank makes the result non-finite on all ranks, so that either
    all ranks skip an fp16 overflow or none does.
    """
    fault_point("grad_reduce")
    if world.size == 1:
        norm: Tensor = torch.linalg.vector_norm(vector_norms(list(gradients.values())))
        return norm
    by_holders: dict[int, list[Tensor]] = {}
    for name, gradient in gradients.items():
        if not is_copy(name, place := placements[name]):
            by_holders.setdefault(place.num_holders, []).append(gradient[: place.counted_rows])
    squares = [vector_norms(group).square().sum() / num for num, group in by_holders.items()]
    # a middle stage without layers holds no weights
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    # collective: sums squares over the world; values that several ranks hold are divided by the number of holders
    return all_reduce(total, world, wait_name="the gradient norm").sqrt()


@torch.no_grad()
def apply_clip(gradients: list[Tensor], norm: Tensor, clip_norm: float | None, loss_scale: float) -> None:
    """Divide the gradients by `loss_scale` and clip them to the norm `clip_norm` (None: no clipping), in place in a
    single multiplication. `norm` is their norm before both.
    """
    factor = clip_factor(norm, clip_norm, loss_scale)
    if factor is not None:
        torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def clip_factor(norm: Tensor, clip_norm: float | None, loss_scale: float) -> Tensor | None:
    """Return the factor, a scalar on the device, that divides gradients by `loss_scale` and clips them to the norm
    `clip_norm` (None: no clipping); `norm` is their norm before both. Return None if there is nothing to do.
    """
    if clip_norm is None and loss_scale == 1.0:
        return None
    factor = torch.full_like(norm, 1.0 / loss_scale)
    if clip_norm is None:
        return factor
    # because: 1e-6 prevents a division by zero; torch's own clipping uses the same value
    return factor * (clip_norm / (norm / loss_scale + 1e-6)).clamp(max=1.0)
