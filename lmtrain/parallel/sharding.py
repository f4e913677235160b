"""Data parallelism: FSDP2 for every ZeRO level, and the fp32 shards that the optimizer owns.

Called by apply. One FSDP group a block, so that gathering the next block and reducing the last one's gradients hide
behind computation; embedding, norm and head are the root's. Everything is summed and nothing averaged: the loss is
already divided by the global count. Knows no tensor parallelism: what it is given is a rank's part of the model.

zero 0, 1   one reduction a step, after the last microbatch; weights are gathered once a step
zero 2      one reduce-scatter a microbatch; over dp_replicate once a step
zero 3      as 2, and weights are gathered for each block's forward and backward, and released
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lmtrain.observe import phases
from lmtrain.parallel.collectives import all_gather, reduce_scatter
from lmtrain.parallel.mesh import Mesh
from lmtrain.schedules.table import Action, Kind
from lmtrain.spec import LanguageModel


def apply_data_parallel(model: LanguageModel, mesh: Mesh, zero: int, work_dtype: torch.dtype) -> str:
    """In place, on a model without memory; returns what was done, for the log."""
    assert isinstance(model, nn.Module)
    plane = mesh.data_mesh()
    options: dict[str, Any] = {
        "mesh": plane if mesh.dp_replicate.size > 1 else plane["dp_shard"],
        # because: the model casts where it means to; angles and masks are fp32 and bool in every precision
        "mp_policy": MixedPrecisionPolicy(work_dtype, torch.float32, cast_forward_inputs=False),
    }
    for block in model.blocks.values():
        fully_shard(block, **options, reshard_after_forward=zero == 3)
    # because: backward begins where forward ends, and logits come after `forward`: the root's weights must stay
    fully_shard(model, **options, reshard_after_forward=False)
    for group in _groups(model):
        group.set_gradient_divide_factor(1.0)
        # because: gloo has no scaled sum, and NCCL's would divide what is divided already
        group.set_force_sum_reduction_for_comms(True)
        group.set_custom_all_gather(cast(Any, _AllGather()))
        group.set_custom_reduce_scatter(cast(Any, _ReduceScatter()))
    copies = f", {mesh.dp_replicate.size} copies" if mesh.dp_replicate.size > 1 else ""
    return f"sharded: zero {zero} over {mesh.dp_shard.size}{copies}, a group a block"


class ShardedWeights:
    """MasterWeights of a sharded model: name -> fp32 shard, a plain tensor that shares memory with FSDP's."""

    def __init__(
        self, stages: Mapping[int, LanguageModel], parameters: dict[str, nn.Parameter], zero: int
    ) -> None:
        self.stages = {number: stage for number, stage in stages.items() if isinstance(stage, FSDPModule)}
        self.zero = zero
        self.groups = [group for stage in self.stages.values() for group in _groups(stage)]
        self.sharded = parameters
        self.master = {name: nn.Parameter(_local(parameter.detach())) for name, parameter in self.sharded.items()}
        self._sends: dict[int, tuple[bool, bool]] = {}  # what each stage has been told

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.master.values() if p.grad is not None]

    def begin(self, action: Action, last: bool) -> None:
        """Before a backward: what it is to send and to keep. A first half alone sends nothing."""
        if action.kind in (Kind.BACKWARD, Kind.INPUT):
            self._tell(action.stage, action.kind is Kind.BACKWARD and (last or self.zero >= 2), last)
            if self.zero == 3:
                # because: a head works after FSDP's last look at a forward, so that no hook gathers it for its
                # backward; it is released where another microbatch's backward has come in between
                self.stages[action.stage].unshard()

    def done(self, action: Action, last: bool) -> None:
        """After a second half: gradients have come about behind FSDP's back. They are added up in fp32, then sent."""
        if action.kind is Kind.WEIGHT:
            self._tell(action.stage, False, last)
            end_backward(self.stages[action.stage])
            if last or self.zero >= 2:
                self._tell(action.stage, True, last)
                end_backward(self.stages[action.stage])

    def _tell(self, stage: int, sends: bool, last: bool) -> None:
        if self._sends.get(stage) == (sends, last):
            return
        self._sends[stage] = sends, last
        model = self.stages[stage]
        model.set_requires_gradient_sync(sends)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(sends and (last or self.zero == 3))

    @torch.no_grad()
    def collect(self) -> None:
        """After the last backward: hand over the reduced shards of gradients."""
        for name, parameter in self.sharded.items():
            if parameter.grad is not None:
                self.master[name].grad = _local(parameter.grad)
                parameter.grad = None

    def publish(self) -> None:
        """After an update or a load: release gathered weights, so that nothing computes with old ones."""
        for group in self.groups:
            group.reshard()

    def clear_gradients(self) -> None:
        for parameter in self.master.values():
            parameter.grad = None


class _Talk:
    """What FSDP says to other ranks, as it would say it itself, with a mark: it may wait there."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Talk):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with phases.within("collective", "the weights of a block"):
            work: dist.Work | None = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _ReduceScatter(_Talk):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with phases.within("collective", "the gradients of a block"):
            work: dist.Work | None = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


def end_backward(stage: FSDPModule) -> None:
    """FSDP's work at the end of a backward: adds this one's gradients to the fp32 sums, and sends them if it is to.

    because: second halves accumulate gradients after the last hook of a backward has run, and FSDP has no public call
    """
    stage._get_fsdp_state()._root_post_backward_final_callback()


def _groups(model: nn.Module | FSDPModule) -> list[FSDPModule]:
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    return local
