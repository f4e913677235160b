"""Data parallelism: FSDP2 for every ZeRO level, and the fp32 shards that the optimizer owns.

Called by build_parallel. Each block is an FSDP group, so that gathering the next block and reducing the previous
block's gradients overlap compute; each vocabulary table (embedding, head) is a group too; norms, positions and two tied
tables belong to the root group. A step waits for its reductions once, in `collect_gradients`. Gradients are summed, not
averaged: the loss is already divided by the global count. Independent of tensor parallelism: the model is a rank's
part.

zero 0, 1   a reduction per step, after the last micro-batch; weights are gathered once per step. Until then gradients
            accumulate in fp32, those of products directly in the products
zero 2      a reduce-scatter per micro-batch; an all-reduce over dp_replicate once per step
zero 3      as 2, and weights are gathered for each block's forward and backward, and released
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lmtrain.parallel.linear_forward_backward_products import SummingModule, reset_gradient_totals
from lmtrain.parallel.mesh import Mesh
from lmtrain.parallel.tensor_parallel import VocabEmbedding
from lmtrain.parallel.tp_linears_and_collectives import all_gather, reduce_scatter
from lmtrain.parallel.weights.master_weights import GradientCallback
from lmtrain.runtime.processes import current_phase
from lmtrain.schedules.table import Action, Kind
from lmtrain.spec import LanguageModel, Split


def apply_data_parallel(model: LanguageModel, mesh: Mesh, zero: int, work_dtype: torch.dtype) -> str:
    """Shard a model over the data-parallel ranks of the mesh with FSDP2, in place; the model is on the meta device.
    `zero` is the ZeRO level from 0 to 3, `work_dtype` the dtype of forward and backward. Return a line for the log.
    """
    assert isinstance(model, nn.Module)
    plane = mesh.data_mesh()
    options: dict[str, Any] = {
        "mesh": plane if mesh.dp_replicate.size > 1 else plane["dp_shard"],
        # because: the model casts its inputs itself; angles stay fp32 and masks bool in every precision
        "mp_policy": MixedPrecisionPolicy(work_dtype, torch.float32, cast_forward_inputs=False),
    }
    tables = _vocabulary_tables(model)
    for block in model.blocks.values():
        fully_shard(block, **options, reshard_after_forward=zero == 3)
    for table in tables:
        # because: a head's backward starts right after its forward, so releasing its weights would gather them twice
        fully_shard(table, **options, reshard_after_forward=zero == 3 and _is_embedding(table))
    # because: backward starts right after forward, and logits come after `forward`, so the root's weights must stay
    fully_shard(model, **options, reshard_after_forward=False)
    _set_backward_prefetch(model)
    for group in _fsdp_groups(model):
        group.set_gradient_divide_factor(1.0)
        # because: gloo has no scaled sum, and NCCL's scaled sum would divide a second time
        group.set_force_sum_reduction_for_comms(True)
        reduce_scatter_hook = _ReduceScatter(mesh)
        group.set_custom_all_gather(cast(Any, _AllGather(mesh)))
        group.set_custom_reduce_scatter(cast(Any, reduce_scatter_hook))
        if mesh.dp_replicate.size > 1:
            group.set_all_reduce_hook(reduce_scatter_hook.trace_replica_sum)
    replicas_text = f", {mesh.dp_replicate.size} replicas" if mesh.dp_replicate.size > 1 else ""
    of_vocabulary = f" and {len(tables)} for the vocabulary" if tables else ""
    return f"sharded: zero {zero} over {mesh.dp_shard.size}{replicas_text}, one group per block{of_vocabulary}"


def _vocabulary_tables(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weight has a row per token of the vocabulary: the embedding and the head. Leave both out
    if they share a tensor, which then belongs to FSDP's root group.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = [{tie.first, tie.second} for tie in cast(LanguageModel, model).ties()]
    shared = set[str]().union(*(tie for tie in ties if tie <= names))
    owners = {name: name.rpartition(".")[0] for name in names}
    vocabulary = {owners[name] for name, cut in cast(LanguageModel, model).cuts().items() if cut.split is Split.VOCAB}
    return [model.get_submodule(path) for path in sorted(vocabulary - {owners[name] for name in shared})]


def _is_embedding(table: nn.Module) -> bool:
    """Return True for an embedding: forward copies its rows, and backward does not need the weights."""
    return isinstance(table, nn.Embedding | VocabEmbedding)


def _set_backward_prefetch(model: LanguageModel) -> None:
    """Make the backward of each FSDP group prefetch the weights of the group whose backward runs next.

    because: FSDP's default is the group of the previous forward, which with several micro-batches in flight is another
    micro-batch's; a group that names itself prefetches nothing
    """
    previous_block: FSDPModule | None = None
    for block in model.blocks.values():
        assert isinstance(block, FSDPModule)
        block.set_modules_to_backward_prefetch([previous_block or block])
        previous_block = block
    assert isinstance(model, nn.Module)
    blocks = {id(block) for block in model.blocks.values()}
    for group in [group for group in _fsdp_groups(model) if id(group) not in blocks]:
        if is_embedding := _is_embedding(cast(nn.Module, group)):
            group.set_unshard_in_backward(False)
        group.set_modules_to_backward_prefetch([group if is_embedding or previous_block is None else previous_block])


class ShardedWeights:
    """The fp32 shards of a sharded model's weights by name: plain tensors that share memory with FSDP's.

    Has the methods of MasterWeights.
    """

    def __init__(
        self,
        stages: Mapping[int, LanguageModel],
        parameters: dict[str, nn.Parameter],
        zero: int,
        summing_modules: Mapping[int, Sequence[SummingModule]],
    ) -> None:
        """Create the shards. `summing_modules` maps each stage to the modules that may sum their weight gradients."""
        self.stages = {number: stage for number, stage in stages.items() if isinstance(stage, FSDPModule)}
        self.zero = zero
        self.groups = [group for stage in self.stages.values() for group in _fsdp_groups(stage)]
        self.embeddings = {
            number: [group for group in _fsdp_groups(stage) if _is_embedding(cast(nn.Module, group))]
            for number, stage in self.stages.items()
        }
        for stage in self.stages.values():
            # because: FSDP then starts reductions but waits only in `collect_gradients`
            stage.set_is_last_backward(False)
        self.sharded = parameters
        self.master = {name: nn.Parameter(_local_tensor(p.detach())) for name, p in self.sharded.items()}
        # because: if each micro-batch's gradients are reduced, there is nothing to accumulate
        self.summing_modules = {number: modules if zero < 2 else () for number, modules in summing_modules.items()}
        self._flags: dict[int, tuple[bool, bool, bool]] = {}  # stage -> the last arguments of `_set_flags`

    def before_action(self, action: Action, is_last_microbatch: bool) -> None:
        """Set FSDP's flags before `action`, if it is a backward, that make it reduce gradients over data-parallel ranks
        or not: from ZeRO level 2 on it does for every micro-batch, at lower levels only for the step's last.

        An input half reduces only the embedding's gradients.
        """
        if action.kind in (Kind.BACKWARD, Kind.INPUT):
            reduces = is_last_microbatch or self.zero >= 2
            whole_stage_reduces = reduces and action.kind is Kind.BACKWARD
            self._set_flags(action.stage, whole_stage_reduces, is_last_microbatch, embeddings_reduce=reduces)
            if self.zero == 3:
                # because: the head runs after FSDP's forward hooks, so that no hook gathers its weights for
                # backward; another micro-batch's backward in between releases them
                self.stages[action.stage].unshard()
        if is_last_microbatch and action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            self._set_total_gradients(action.stage)

    def _set_total_gradients(self, stage: int) -> None:
        """Use the fp32 gradient sums of a pipeline stage's linears as the gradients of their weights, before a step's
        last backward, so that FSDP reduces them.
        """
        for module in self.summing_modules[stage]:
            if module.gradient_total is not None:
                # the gradient of a tied weight's other uses: in fp32 from the second step on, and left in place by FSDP
                if module.weight.grad is not None:
                    module.gradient_total.add_(module.weight.grad)
                module.weight.grad_dtype = torch.float32
                module.weight.grad = module.gradient_total

    def after_action(self, action: Action, is_last_microbatch: bool) -> None:
        """Accumulate, and reduce if due, the gradients of `action` if it is the weight half of a split backward, which
        FSDP's hooks do not see. Do nothing after other actions.
        """
        if action.kind is Kind.WEIGHT:
            self._set_flags(action.stage, False, is_last_microbatch)
            finish_backward(self.stages[action.stage])
            if is_last_microbatch or self.zero >= 2:
                self._set_flags(action.stage, True, is_last_microbatch)
                finish_backward(self.stages[action.stage])

    def on_complete_gradient(self, name: str, stage: int, half: Kind, callback: GradientCallback) -> None:
        """Register `callback(name, gradient shard)` for the weight `name` of pipeline stage `stage`, called in each
        step after FSDP has reduced the weight's gradient for the last time. `half` is unused.

        It runs in the reduction stream, so that no compute waits for it.
        """

        def after_reduction(parameter: Tensor) -> None:
            _, _, is_last_microbatch = self._flags[stage]
            if is_last_microbatch and parameter.grad is not None:
                callback(name, _local_tensor(parameter.grad))

        # because: FSDP calls these hooks after it has accumulated a reduced gradient
        self.sharded[name].register_post_accumulate_grad_hook(after_reduction)  # type: ignore[no-untyped-call]

    def _set_flags(
        self, stage: int, reduces: bool, is_last_microbatch: bool, *, embeddings_reduce: bool = False
    ) -> None:
        """Set FSDP's flags for the next backward of a pipeline stage. `reduces` says whether it reduces gradients over
        data-parallel ranks, `embeddings_reduce` whether at least the embeddings' gradients are reduced.
        """
        if self._flags.get(stage) == (reduces, embeddings_reduce, is_last_microbatch):
            return
        self._flags[stage] = reduces, embeddings_reduce, is_last_microbatch
        model = self.stages[stage]
        model.set_requires_gradient_sync(reduces)
        for table in self.embeddings[stage]:
            table.set_requires_gradient_sync(reduces or embeddings_reduce)
        model.set_requires_all_reduce(is_last_microbatch)
        model.set_reshard_after_backward(reduces and (is_last_microbatch or self.zero == 3))

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Wait for FSDP's gradient reductions after a step's last backward, and make the reduced shards the gradients
        of the fp32 master weights.
        """
        for stage in self.stages.values():
            stage.set_is_last_backward(True)
            finish_backward(stage)
            stage.set_is_last_backward(False)
        for name, parameter in self.sharded.items():
            if parameter.grad is not None:
                self.master[name].grad = _local_tensor(parameter.grad)
                parameter.grad = None

    @property
    def compute_copies(self) -> dict[Tensor, Tensor]:
        """An empty mapping: shards are rounded when they are gathered."""
        return {}

    def publish(self, *, already_written: bool = False) -> None:
        """Release gathered weights after an update or a load, so that no forward uses old values."""
        for group in self.groups:
            group.reshard()

    def clear_gradients(self, num_microbatches: int) -> None:
        """Clear the weights' gradients before a step of `num_microbatches` micro-batches; with several, zero also the
        fp32 sums to which products add gradients.
        """
        for parameter in self.master.values():
            parameter.grad = None
        for modules in self.summing_modules.values():
            reset_gradient_totals(modules, num_microbatches)


class _TracedCollective:
    """The base of FSDP's collectives, which behave as FSDP's own do and mark waits in traces."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return FSDP's communication buffer of this size."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_TracedCollective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with current_phase.within("collective", "the weights of a block", None, self.mesh.dp_shard, output_tensor):
            work: dist.Work | None = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _ReduceScatter(_TracedCollective):
    since_ns = 0
    began: Any = None  # start of the all-reduce over replicas, which FSDP runs itself after the reduce-scatter

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = super().allocate(size, dtype=dtype, device=device)
        self.began, self.since_ns = current_phase.span_start(buffer), monotonic_ns()
        return buffer

    def trace_replica_sum(self, gradients: Tensor) -> None:
        """Record in the trace the all-reduce of `gradients` over dp_replicate, which FSDP has run after this
        reduce-scatter.
        """
        current_phase.main.count_wait(self.since_ns)
        current_phase.record_collective(
            self.began, "the gradients of a block, over copies", self.mesh.dp_replicate, gradients
        )

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        with current_phase.within("collective", "the gradients of a block", None, self.mesh.dp_shard, input_tensor):
            work: dist.Work | None = reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self.began, self.since_ns = current_phase.span_start(output_tensor), monotonic_ns()
        return work


def finish_backward(stage: FSDPModule) -> None:
    """Run FSDP's end of backward: accumulate gradients in fp32, reduce and wait as its flags say.

    because: weight halves accumulate gradients after the last hook of a backward, and FSDP has no public function for
    this
    """
    stage._get_fsdp_state()._root_post_backward_final_callback()


def _fsdp_groups(model: nn.Module | FSDPModule) -> list[FSDPModule]:
    """Return the model's modules that FSDP shards and gathers as a unit."""
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor as a plain tensor."""
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    return local
