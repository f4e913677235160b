"""Conversion of a run's settings to the planner's terms: a Case, and the overlap that lmtrain achieves. Torch-free.

Called by planning code for thousands of layouts: results that depend on few settings are cached. The program's
properties are read from the code of `parallel`, and each comment names the place there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.parallel.device_and_precision_settings import (
    ComputeSettings,
    NoRecomputeSettings,
    PrecisionSettings,
    RecomputeSettings,
    SomeRecomputeSettings,
)
from lmtrain.placement.attention_activation_bytes import FP32_BYTES, holds_scores, needs_mask, uses_block_masks
from lmtrain.placement.batch_rampup_settings import RampUpSettings
from lmtrain.placement.layers_and_shards_of_ranks import Stage, stages_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.placement.weight_and_activation_bytes import ActivationSizes
from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.plan.cost_model.training_workload import (
    Attention,
    Case,
    Overlap,
    Pointwise,
    Program,
    RecomputedShares,
    Schedule,
)
from lmtrain.plan.run_estimates.checkpoint_size import OptimizerTensorCounter, count_saved_tensors
from lmtrain.spec import ModelShape

LOSS_NUMBERS = 64 << 20  # logits that the loss converts to fp32 at a time: kernels/cross_entropy
LOSS_BYTES = 9  # per logit: the softmax in fp32, a shifted fp32 copy, a label mask

OUR_PROGRAM = Program(
    attention=Attention.FLASH2,
    pointwise=Pointwise.EAGER,
    tp_overlap=Overlap.WEIGHTS,  # collectives: _ColumnLinear.backward
    reduce_overlap=True,  # FSDP's hooks, a group per block
    gather_overlap=True,  # FSDP's hooks: the next block's weights are gathered while a block computes
    send_overlap=True,  # stage_to_stage_messages: receives are posted ahead, sends are waited for late
    reduce_bytes=FP32_BYTES,  # fsdp_sharding: apply_data_parallel
    reduce_each=True,  # fsdp_sharding: ShardedWeights.before_action: zero 2 reduces after every microbatch
    group_buffers=True,  # fsdp_sharding: apply_data_parallel, a group per block
    loss_numbers=LOSS_NUMBERS,
    loss_bytes=LOSS_BYTES,
)
_SCHEDULES = {"gpipe": Schedule.GPIPE, "zb_h1": Schedule.ZB_1, "zb_v": Schedule.ZB_V}


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The settings of a run that decide its time, memory and layouts. The vocabulary size is final."""

    model: ModelSettings
    parallel: ParallelSettings
    precision: PrecisionSettings
    compute: ComputeSettings
    optim: OptimSettings
    recompute: RecomputeSettings = field(default_factory=NoRecomputeSettings)
    micro_batch: int
    global_batch: int
    document_mask: bool = False  # attention is limited to a token's own document
    scored_share: float = 1.0  # share of tokens for which logits are computed
    rampup: RampUpSettings | None = None  # the layout must divide each batch size on the way too
    saves: bool = False  # whether the run saves checkpoints, whose manifests must stay within limits
    average_every_steps: int = 0  # steps between two updates of an average of the weights; 0: the run keeps none

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // (self.micro_batch * self.parallel.layout.dp)

    @property
    def num_saved_tensors(self) -> OptimizerTensorCounter:
        """The number of tensors beside a weight that a checkpoint has, as a function of its name and shape."""
        return count_saved_tensors(self.optim.num_slots, keeps_average=self.average_every_steps > 0)

    @property
    def compiles(self) -> bool:
        """True if blocks are compiled; `auto` is resolved as on a GPU, from the schedule.

        Callers that have more facts (the machine, dropout) resolve `auto` beforehand.

        because: a search prices the effects of the schedule and of the cut separately
        """
        return self.compute.compiles(self.parallel, uses_dropout=False, on_gpu=self.compute.device != "cpu")

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in compute precision."""
        return FP32_BYTES if self.precision.kind == "fp32" else FP32_BYTES // 2

    @property
    def product_precision(self) -> str:
        """Precision of the inputs of matrix products."""
        return "tf32" if self.compute.tf32 else self.precision.kind

    @property
    def sequence_parts(self) -> int:
        """Number of parts into which the sequence is cut outside of attention and MLP."""
        return self.parallel.tp if self.parallel.sequence_parallel else 1

    @property
    def loss_bytes(self) -> int:
        """Working bytes per logit of the loss, beside the logits and their gradient."""
        return 0 if self.compiles or not self.on_cpu else LOSS_BYTES

    @cached_property
    def shape(self) -> ModelShape:
        return self.model.shape

    @cached_property
    def layers(self) -> ActivationSizes:
        """Sizes of the activations that layers keep."""
        return ActivationSizes(self)

    @cached_property
    def has_mask(self) -> bool:
        """True if attention needs an explicit mask matrix, which only the slower attention kernels support."""
        return needs_mask(self.model, document_mask=self.document_mask) and not uses_block_masks(
            self.model, on_gpu=not self.on_cpu
        )

    @property
    def window(self) -> int:
        """Number of positions that a token attends to in sliding-window attention. It is 0 if no layer has such a
        window, or if the kernels compute all positions and mask the others.
        """
        shape = self.shape
        if self.has_mask or not shape.num_window_layers or shape.window_in(shape.seq_len) == shape.seq_len:
            return 0
        return shape.window_in(shape.seq_len) * (1 if shape.causal else 2)

    @property
    def stages(self) -> tuple[tuple[Stage, ...], ...]:
        """The pipeline stages of each pipeline rank."""
        p = self.parallel
        return _stages_by_rank(self.model, p.pp, p.vp, p.schedule, p.balance)

    @property
    def on_cpu(self) -> bool:
        return self.compute.device == "cpu"

    def recomputes(self, block: int) -> bool:
        """Return whether the backward of block number `block` recomputes any activations."""
        return isinstance(self.recompute, SomeRecomputeSettings) and self.recompute.is_for(block)

    def recompute_kind(self, block: int) -> str:
        """Return which kind of recompute block number `block` uses, "none" if it recomputes nothing."""
        return self.recompute.kind if self.recomputes(block) else "none"


def build_program(run: PlannedRun, hardware: Hardware) -> Program:
    """Return a description of how lmtrain itself executes this run on this machine: its attention kernel, which kernels
    are fused, and which collectives overlap with computation.
    """
    has_scores = holds_scores(run.model, on_cpu=run.on_cpu) and run.model.caps_scores
    has_old_flash = run.has_mask or run.precision.kind == "fp32" or hardware.generation == "volta"
    return replace(
        OUR_PROGRAM,
        attention=Attention.SCORES if has_scores else Attention.FLASH1 if has_old_flash else Attention.FLASH2,
        pointwise=Pointwise.COMPILED if run.compiles else Pointwise.EAGER,
        fused_loss=not run.loss_bytes,
        tp_overlap=Overlap.NONE if run.compiles else Overlap.WEIGHTS,  # because: graphs wait for collectives
        # fsdp_sharding: ShardedWeights.after_action: FSDP does not see the second halves, so their gradients are
        # reduced at the end
        reduce_overlap=not run.parallel.splits_backward,
        fused_gradients=0 if run.precision.kind == "fp32" else 2,  # see reset_gradient_totals
        fused_optimizer=run.optim.kind == "adamw",
        loss_bytes=run.loss_bytes, over_logits=not run.on_cpu,
    )


def build_case(run: PlannedRun, hardware: Hardware) -> Case:
    """Describe a run with its settings and a machine as a Case: the numbers from which the planner predicts step time
    and memory.
    """
    parallel, model, shape = run.parallel, run.model, run.shape
    window_share = shape.num_window_layers / shape.num_layers if run.window else 1.0
    layer_counts = [sum(len(stage.layers) for stage in stages) for stages in run.stages]
    last_rank = next(rank for rank, stages in enumerate(run.stages) if any(stage.last for stage in stages))
    other_counts = [count for rank, count in enumerate(layer_counts) if rank != last_rank] or layer_counts
    return Case(
        hardware=hardware, program=build_program(run, hardware),
        num_layers=shape.num_layers, width=shape.width, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        head_width=shape.head_width, ffn_width=shape.ffn_width, gated=shape.gated,
        vocab=-(-model.padded_vocab_size // parallel.tp) * parallel.tp, seq_len=shape.seq_len,
        tied=bool(model.ties()), scored_share=run.scored_share,
        # because: with a mask matrix kernels skip neither the causal half of the scores nor those beyond a window
        causal=shape.causal and not run.has_mask and (not run.window or window_share < 1),
        window=run.window, window_share=window_share,
        rotary=any(kind.rotary for kind in model.layer_kinds),
        parallel_block=getattr(model, "parallel_block", "no") != "no", extra_norms=_extra_norms(model),
        qk_norm=getattr(model, "qk_norm", "none") != "none", dropout=model.uses_dropout,
        scaled_logits=run.layers.scales_logits, capped_logits=run.layers.caps_logits,
        pp=parallel.pp, vp=parallel.vp, dp=parallel.layout.dp, tp=parallel.tp,
        zero=parallel.zero if parallel.dp_shard > 1 else 0, shard=parallel.dp_shard,
        sequence_parallel=run.sequence_parts > 1,
        microbatch=run.micro_batch, num_microbatches=run.num_microbatches,
        schedule=_SCHEDULES.get(parallel.schedule, Schedule.ONE_F_ONE_B),
        first_stage=layer_counts[0], largest_stage=max(other_counts), last_stage=layer_counts[last_rank],
        recomputed=recomputed_shares(run),
        precision=run.product_precision,
        optimizer_bytes=_optimizer_bytes(model, run.optim) + FP32_BYTES * (run.average_every_steps > 0),
        # because: an update reads the weight and its average, and writes the average
        average_bytes=3 * FP32_BYTES / run.average_every_steps if run.average_every_steps else 0.0,
    )  # fmt: skip


def _extra_norms(model: ModelSettings) -> int:
    """Return how many norm layers a transformer block has in addition to the usual number: two, or one if attention and
    MLP run in parallel on one norm's output. A norm that multiplies by 1 + weight counts twice, as it takes two
    kernels.
    """
    if not hasattr(model, "block_norms"):
        return 0
    num_kernels = len(model.block_norms) * (2 if getattr(model, "norm_weight", "ones") == "from_zero" else 1)
    return num_kernels - (2 if getattr(model, "parallel_block", "no") == "no" else 1)


def recomputed_shares(run: PlannedRun) -> RecomputedShares:
    """Return the shares, from 0 to 1, of the forward of a pipeline rank's blocks that the backward recomputes, by kind
    of work: matrix products, attention, pointwise operations, collectives. They are those of the rank that recomputes
    most.

    The other ranks of the pipeline wait for this rank.
    """
    if not isinstance(run.recompute, SomeRecomputeSettings):
        return RecomputedShares()
    share = 1.0 if run.recompute.blocks is None else max(_recomputed_share(run, stages) for stages in run.stages)
    match run.recompute.kind:
        case "full":
            return RecomputedShares(products=share, attention=share, pointwise=share, collectives=share)
        case "attention":
            return RecomputedShares(attention=share)
        case "operators":  # because: products are kept before the all-reduce over tp
            return RecomputedShares(pointwise=share, collectives=share)
    raise AssertionError(f"The planner does not know what recompute.kind={run.recompute.kind} recomputes.")


def _recomputed_share(run: PlannedRun, stages: tuple[Stage, ...]) -> float:
    """Return the share of the blocks in these stages whose backward recomputes activations."""
    blocks = [block for stage in stages for block in stage.layers]
    return sum(map(run.recomputes, blocks)) / max(len(blocks), 1)


@lru_cache(maxsize=4096)
def _stages_by_rank(
    model: ModelSettings, pp: int, vp: int, schedule: str, balance: Literal["layers", "cost"]
) -> tuple[tuple[Stage, ...], ...]:
    """Return the pipeline stages of each pipeline rank."""
    parallel = ParallelSettings(pp=pp, vp=vp, schedule=schedule, balance=balance)
    return tuple(tuple(stages_of_rank(model, parallel, rank)) for rank in range(pp))


@lru_cache(maxsize=64)
def _optimizer_bytes(model: ModelSettings, optim: OptimSettings) -> float:
    """Return the bytes of optimizer state per weight, averaged over the model: the fp32 master weight and the tensors
    that the optimizer keeps, such as moments.
    """
    weights = model.weights()
    slots = sum(optim.num_slots(name, shape) * math.prod(shape) for name, shape in weights.items())
    return FP32_BYTES * (1 + slots / sum(map(math.prod, weights.values())))
