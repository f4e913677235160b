"""The memory of a rank in bytes: weights, and the activations that a micro-batch keeps in a stage. Torch-free.

Called by preflight's table of a layout, and by the planner. Activations follow the layers as models and parallel run
them, saved tensor by saved tensor, kernel by kernel; a compiler keeps no more. If kernels differ, the device decides: a
GPU's norms are a kernel each, a CPU's RMSNorm is several in fp32. tests/layouts compares every term with real
processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from lmtrain.layout import Coordinate, Layout
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.attention_activation_bytes import BOOL_BYTES, FP32_BYTES, AttentionSizes, Run
from lmtrain.placement.layers_and_shards_of_ranks import (
    Placement,
    Shape,
    Stage,
    parameter_names_of_stages,
    place_parameters,
)
from lmtrain.spec import Cuts, LayerKind

INT64_BYTES = 8


@dataclass(frozen=True)
class RankBytes:
    """Bytes of weights, gradients and optimizer state on a rank."""

    masters: int  # fp32 master weights, owned by the optimizer
    work: int  # weights used for compute, 0 if the masters themselves are used
    gradients: int
    optimizer: int
    average: int = 0  # an exponential average of the weights in fp32


@dataclass(frozen=True)
class ElementCounts:
    """The numbers of elements that a rank holds of a set of weights."""

    parts: int = 0  # elements of this tensor-parallel rank's parts
    shards: int = 0  # elements of its data-parallel shard of the parts, padded to equal shards
    slots: int = 0  # elements of optimizer state, without padding
    early: int = 0  # elements of parts that are not factors of products: the input half of backward has their gradient
    local: int = 0  # elements of its data-parallel shard of the parts, without padding

    def __add__(self, other: ElementCounts) -> ElementCounts:
        return ElementCounts(
            self.parts + other.parts, self.shards + other.shards, self.slots + other.slots, self.early + other.early,
            self.local + other.local,
        )  # fmt: skip

    def __sub__(self, other: ElementCounts) -> ElementCounts:
        return ElementCounts(
            self.parts - other.parts, self.shards - other.shards, self.slots - other.slots, self.early - other.early,
            self.local - other.local,
        )  # fmt: skip


def count_elements(
    placements: Iterable[Placement], layout: Layout, num_slots: Callable[[str, Shape], int] = lambda name, shape: 2
) -> ElementCounts:
    """Return how many elements of weights and optimizer state a rank holds, given the placements of its parameters.
    `num_slots(name, shape)` returns how many state tensors the optimizer keeps for a parameter of this name and whole
    shape; the default, 2, is that of Adam.
    """
    placements = list(placements)
    return ElementCounts(
        sum(math.prod(p.part_shape) for p in placements),
        sum(math.prod((-(-p.part_shape[0] // layout.dp_shard), *p.part_shape[1:])) for p in placements),
        sum(num_slots(p.name, p.global_shape) * math.prod(p.local_shape) for p in placements),
        sum(
            math.prod(p.part_shape)
            for p in placements if len(p.part_shape) == 1 or p.name.startswith("embedding.")
        ),
        sum(math.prod(p.local_shape) for p in placements),
    )  # fmt: skip


def rank_bytes(
    counts: ElementCounts, layout: Layout, *, zero: int, work_bytes: int, keeps_average: bool = False
) -> RankBytes:
    """Return the bytes of weights, gradients and optimizer state that a rank holds between two micro-batches. `counts`
    are the rank's elements, `zero` is the ZeRO stage (0 to 3), `work_bytes` the bytes of an element in the compute
    dtype, and `keeps_average` adds an fp32 average of the weights.

    zero 0 and 1 keep whole gathered weights and whole gradients; 2 keeps shards of gradients; 3 keeps shards of both,
    and gathers a block at a time.
    """
    optimizer, average = FP32_BYTES * counts.slots, FP32_BYTES * counts.local * keeps_average
    if layout.dp == 1:
        work = 0 if work_bytes == FP32_BYTES else work_bytes * counts.parts
        return RankBytes(FP32_BYTES * counts.parts, work, FP32_BYTES * counts.parts, optimizer, average)
    return RankBytes(
        masters=FP32_BYTES * counts.shards,
        work=work_bytes * counts.shards * layout.dp_shard if zero < 3 else 0,
        gradients=FP32_BYTES * (counts.parts if zero < 2 else counts.shards),
        optimizer=optimizer,
        average=average,
    )


def placements_of_stages(
    model: ModelSettings,
    stages: Sequence[Stage],
    layout: Layout,
    shard_index: int,
) -> list[Placement]:
    """Return the placement of each parameter of the pipeline stages `stages` on a rank whose index along dp_shard is
    `shard_index` (other indexes are 0). If the rank has the first and the last stage, a weight that they share occurs
    twice.

    Parameters of equal shape and cut, as in all layers, are computed once.
    """
    all_shapes, cuts = shapes_and_cuts(model)
    both = len(stages) > 1 and stages[0].first and stages[-1].last
    names = parameter_names_of_stages(model, [*stages]) + [tie.first for tie in model.ties() if both]
    name_by_shape = {(all_shapes[name], cuts.get(name)): name for name in names}
    placements = place_parameters(
        {name: all_shapes[name] for name in name_by_shape.values()}, cuts, layout,
        Coordinate(0, 0, shard_index, 0), model.shape.vocab_size,
    )  # fmt: skip
    return [replace(placements[name_by_shape[all_shapes[name], cuts.get(name)]], name=name) for name in names]


@lru_cache(maxsize=16)  # because: callers ask about many ranks of the same model
def shapes_and_cuts(model: ModelSettings) -> tuple[dict[str, Shape], Cuts]:
    """Return the shape of each parameter of the model, and how parameters may be split over tp."""
    return model.weights(), model.cuts()


@dataclass(frozen=True)
class ActivationBytes:
    """The bytes that a micro-batch holds in a stage between two actions of a schedule."""

    hidden: float = 0.0  # from forward to backward, or to the input half of backward
    logits: float = 0.0  # from forward on; then their gradient, until the weight half
    deferred: float = 0.0  # from the input half to the weight half: inputs of matrix products and gradients of outputs


class ActivationSizes:
    """The sizes of a rank's activations in a run. Attributes and results are bytes per token, unless said otherwise."""

    def __init__(self, run: Run) -> None:
        self.run, shape, tp, e = run, run.shape, run.parallel.tp, run.number_bytes
        model: Any = run.model
        self.tokens = run.micro_batch * shape.seq_len  # number of tokens of a micro-batch
        self.cpu = run.on_cpu
        self.whole = shape.width * e  # hidden states of the whole sequence
        self.cut = self.whole / run.sequence_parts  # hidden states outside of attention and MLP, sharded
        self.ffn = shape.ffn_width * e / tp
        self.up = self.ffn * (2 if shape.gated else 1)
        self.logits: float = -(-model.padded_vocab_size // tp) * e * run.scored_share
        self.activation = getattr(model, "activation", "gelu")
        self.learned_positions = getattr(model, "positions", "learned") == "learned"
        self.parallel_block = getattr(model, "parallel_block", "no")
        self.scales_residual = getattr(model, "residual_scale", 1.0) != 1.0
        self.post_norm = getattr(model, "norm_order", "pre") == "post"
        norms = getattr(model, "block_norms", ("attention_norm", "mlp_norm"))
        self.num_norms = len(norms)
        self.norms_inputs = "attention_norm" in norms and not self.post_norm
        self.rms = getattr(model, "norm", "layernorm") == "rmsnorm"
        self.norm_weight = getattr(model, "norm_weight", "ones")
        self.z_loss = FP32_BYTES if getattr(model, "z_loss", 0.0) else 0.0  # a factor of each row's softmax
        self.head_bias = isinstance(model, BertSettings) or getattr(model, "head_bias", False)
        self.caps_logits = getattr(model, "logit_cap", None) is not None
        self.scales_logits = self.caps_logits or getattr(model, "logit_scale", 1.0) != 1.0
        # dropout masks
        self.dropped = self.cut / e * (e if self.cpu else BOOL_BYTES) if model.uses_dropout else 0.0
        self.attention = cache(lambda kind: AttentionSizes(run, kind))

    @property
    def copies_norm_inputs(self) -> bool:
        """True if a norm keeps an fp32 copy of its input, and not the input itself."""
        return self.rms and self.cpu and self.run.number_bytes < FP32_BYTES

    def norm_bytes(self) -> float:
        """Return the bytes per token that a norm layer keeps for backward: its input and its statistics, and the
        normalized input if a separate kernel multiplies it by the weight. The output is counted by the layer that reads
        it.
        """
        from_zero = self.cut if self.norm_weight == "from_zero" else 0.0
        if self.rms and self.cpu:  # in fp32: the input, and the normalized input that multiplies the weight
            in_fp32 = self.cut * FP32_BYTES / self.run.number_bytes
            factors = (2 if self.norm_weight == "ones" else 1) * in_fp32
            return factors + FP32_BYTES / self.run.sequence_parts + from_zero
        statistics = self.run.number_bytes if self.cpu else FP32_BYTES
        return self.cut + (1 if self.rms else 2) * statistics / self.run.sequence_parts + from_zero

    def block_bytes(self, recompute: str, kind: LayerKind) -> float:
        """Return the bytes per token that one transformer block, whose layer is of this `kind`, keeps for backward.
        `recompute` names what backward computes again: "none", "attention", "operators" or "full".
        """
        attention = self.attention(kind)
        if recompute == "full":
            return self.cut
        if recompute == "operators":  # matrix products before the tp reduction, and attention
            return self.cut + attention.product_bytes() + self.whole + self.up + self.whole
        inside = attention.projection_bytes() if recompute == "attention" else attention.core_bytes()
        return self._residual_bytes() + inside + attention.heads + self.mlp_bytes() + 2 * self.dropped

    def _residual_bytes(self) -> float:
        """Return the bytes per token that a block keeps for backward of its hidden states outside of attention and MLP:
        what the norms keep, and their outputs, which the first linear layers read.
        """
        inputs = 1 if self.parallel_block == "one_norm" else 2
        # because: two norms of the same hidden states keep one tensor
        shared = self.cut if self.parallel_block == "two_norms" and not self.copies_norm_inputs else 0.0
        return self.num_norms * self.norm_bytes() + inputs * self.cut - shared

    def mlp_bytes(self) -> float:
        """Return the bytes per token that an MLP keeps for backward: all tensors from the output of its first linear
        layer to the input of its last.
        """
        # because: a GPU's kernel computes the activation again
        if not self.cpu:
            return self.up + self.ffn
        squared = self.ffn if self.activation == "relu2" else 0.0  # its square is a result beside the relu's
        if self.run.shape.gated:
            return self.up + self.ffn + self.ffn + squared
        # because: a relu keeps its result, which the last linear keeps too
        return self.ffn + (squared if self.activation in ("relu", "relu2") else self.up)

    def shared_bytes(self, stage: Stage) -> float:
        """Return the bytes per micro-batch, not per token, of tensors that a pipeline stage keeps once for all of its
        blocks, such as rotary angles and attention masks, and of small tensors of the heads and losses.
        """
        run, model = self.run, self.run.model
        rows = run.shape.seq_len * (run.micro_batch if run.document_mask else 1)
        total = 0.0
        settings: Any = model
        # layers with a window have angles of their own if they have a base of their own
        kinds = {model.layer_kinds[number] for number in stage.layers}
        if bases := {kind.window and settings.local_rotary_base is not None for kind in kinds if kind.rotary}:
            total += len(bases) * FP32_BYTES * settings.rotary_width(run.shape.head_width) * rows
        recomputed = [number for number in stage.layers if run.recompute_kind(number) != "none"]
        if run.shape.causal:
            windows = {model.layer_kinds[number].window: model.layer_kinds[number] for number in recomputed}
            # a bidirectional model's mask is a view of the batch
            total += BOOL_BYTES * sum(self.attention(kind).num_mask_elements for kind in windows.values())
        if stage.first and self.learned_positions and not run.document_mask:
            total += INT64_BYTES * rows
        if stage.last and isinstance(model, BertSettings) and model.pair_head:
            total += FP32_BYTES * (2 * run.micro_batch + 1)
        if stage.last and self.head_bias:
            columns = -(-model.padded_vocab_size // run.parallel.tp)  # the mask of padded columns on the last tp rank
            total += BOOL_BYTES * columns if columns * run.parallel.tp > run.shape.vocab_size else 0
        return total

    def embedding_bytes(self) -> float:
        """Return the bytes per token that the embedding, which the first pipeline stage has, keeps for backward."""
        return (
            self.dropped + (self.norm_bytes() if isinstance(self.run.model, BertSettings) and self.post_norm else 0.0)
            + (INT64_BYTES + BOOL_BYTES if self.run.parallel.tp > 1 else 0.0)
        )  # fmt: skip

    def input_bytes(self, stage: Stage) -> float:
        """Return the bytes per token that a pipeline stage other than the first keeps of the hidden states that it
        receives, in addition to what its blocks keep. It is 0 unless its first norm keeps an fp32 copy in place of
        them.
        """
        recompute = self.run.recompute_kind(stage.layers[0]) if stage.layers else "none"
        is_first_read_by_norm = self.norms_inputs or not stage.layers
        copied = self.copies_norm_inputs and is_first_read_by_norm and recompute in ("none", "attention")
        return self.cut if copied else 0.0

    def head_bytes(self) -> float:
        """Return the bytes per token that the final norm, the output head and the loss keep for backward on the last
        pipeline stage; logits are counted separately.
        """
        # because: over tp the loss keeps each row's label index and two sums
        loss = INT64_BYTES + 2 * FP32_BYTES if self.run.parallel.tp > 1 else self.z_loss
        final = 0.0 if self.post_norm else self.norm_bytes()
        # because: tanh keeps its result, and the choice of padding a bool for each logit
        capped = self.logits * (1 + BOOL_BYTES / self.run.number_bytes) if self.caps_logits else 0.0
        if not isinstance(self.run.model, BertSettings):
            return final + self.cut + loss + capped
        # a copy of the first tokens, and the pooler's output
        first_tokens = 2 * self.whole / self.run.shape.seq_len if self.run.model.pair_head else 0.0
        places, labels = INT64_BYTES / self.run.sequence_parts, INT64_BYTES
        scored_bytes = 2 * self.cut + self.norm_bytes() + self.cut + loss + places + labels
        return final + first_tokens + self.run.scored_share * scored_bytes

    def deferred_block_bytes(self) -> float:
        """Return the bytes per token that a block keeps between the two halves of a split backward (zero-bubble
        schedules): the inputs of its linear layers and the gradients of their outputs, from which the second half
        computes weight gradients.

        Matrix products on a sharded sequence each keep their own gathered copy; on a whole sequence they share equal
        tensors.
        """
        attention = self.attention(LayerKind())
        same_inputs = self.whole if self.parallel_block == "one_norm" else 0.0
        same_gradients = self.whole if self.parallel_block != "no" and not self.scales_residual else 0.0
        shared = same_inputs + same_gradients if self.run.sequence_parts == 1 else 0.0
        return 4 * self.whole + attention.heads + self.ffn + attention.qkv + self.up - shared

    def deferred_head_bytes(self) -> float:
        """Return the bytes per token that the head keeps from the input half to the weight half of a split backward."""
        dense = 2 * self.cut if isinstance(self.run.model, BertSettings) else 0.0
        return self.run.scored_share * (self.whole + dense)

    def activation_bytes(self, stage: Stage) -> ActivationBytes:
        """Return the bytes of activations of one micro-batch that the pipeline stage holds between its forward and its
        backward, with logits and the tensors between two halves of a split backward counted separately.
        """
        kinds = self.run.model.layer_kinds
        blocks = Counter((self.run.recompute_kind(number), kinds[number]) for number in stage.layers)
        hidden = sum(num_blocks * self.block_bytes(*block) for block, num_blocks in blocks.items())
        deferred = len(stage.layers) * self.deferred_block_bytes()
        hidden += self.embedding_bytes() if stage.first else self.input_bytes(stage)
        if stage.last:
            hidden += self.head_bytes()
            deferred += self.deferred_head_bytes()
        n = self.tokens
        logits = n * self.logits if stage.last else 0.0
        return ActivationBytes(n * hidden + self.shared_bytes(stage), logits, n * deferred)
