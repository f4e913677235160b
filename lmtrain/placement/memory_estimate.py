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
from typing import Any, Protocol

from lmtrain.layout import Coordinate, Layout
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.layers_and_shards_of_ranks import (
    Placement,
    Shape,
    Stage,
    parameter_names_of_stages,
    place_parameters,
)
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.spec import Cuts, ModelShape

FP32_BYTES, INT64_BYTES, BOOL_BYTES = 4, 8, 1
LEAST_HEAD_WIDTH = 16  # because: the matrix products in flex_attention's kernels need at least this size


@dataclass(frozen=True)
class RankBytes:
    """Bytes of weights, gradients and optimizer state on a rank."""

    masters: int  # fp32 master weights, owned by the optimizer
    work: int  # weights used for compute, 0 if the masters themselves are used
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.masters + self.work + self.gradients + self.optimizer


@dataclass(frozen=True)
class ElementCounts:
    """The numbers of elements that a rank holds of a set of weights."""

    parts: int = 0  # elements of this tensor-parallel rank's parts
    shards: int = 0  # elements of its data-parallel shard of the parts, padded to equal shards
    slots: int = 0  # elements of optimizer state, without padding
    early: int = 0  # elements of parts that are not factors of products: the input half of backward has their gradient

    def __add__(self, other: ElementCounts) -> ElementCounts:
        return ElementCounts(
            self.parts + other.parts, self.shards + other.shards, self.slots + other.slots, self.early + other.early,
        )  # fmt: skip

    def __sub__(self, other: ElementCounts) -> ElementCounts:
        return ElementCounts(
            self.parts - other.parts, self.shards - other.shards, self.slots - other.slots, self.early - other.early,
        )  # fmt: skip


def count_elements(
    placements: Iterable[Placement], layout: Layout, num_slots: Callable[[str, Shape], int] = lambda name, shape: 2
) -> ElementCounts:
    """Return how many elements of weights and optimizer state a rank holds of the parameters in `placements`.

    `num_slots` returns how many state tensors the optimizer keeps for a parameter of this name and global shape.
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
    )  # fmt: skip


def rank_bytes(counts: ElementCounts, layout: Layout, *, zero: int, work_bytes: int) -> RankBytes:
    """Return the bytes of weights, gradients and optimizer state that a rank holds between two micro-batches. `zero` is
    the ZeRO level, `work_bytes` the size of an element in the compute dtype.

    zero 0 and 1 keep whole gathered weights and whole gradients; 2 keeps shards of gradients; 3 keeps shards of both,
    and gathers a block at a time.
    """
    optimizer = FP32_BYTES * counts.slots
    if layout.dp == 1:
        work = 0 if work_bytes == FP32_BYTES else work_bytes * counts.parts
        return RankBytes(FP32_BYTES * counts.parts, work, FP32_BYTES * counts.parts, optimizer)
    return RankBytes(
        masters=FP32_BYTES * counts.shards,
        work=work_bytes * counts.shards * layout.dp_shard if zero < 3 else 0,
        gradients=FP32_BYTES * (counts.parts if zero < 2 else counts.shards),
        optimizer=optimizer,
    )


def placements_of_stages(
    model: ModelSettings,
    stages: Sequence[Stage],
    layout: Layout,
    shard_index: int,
    parameters: ModelParameters | None = None,
) -> list[Placement]:
    """Return the placements of the parameters of a rank's pipeline stages; a tied weight held by two of them occurs
    twice. `shard_index` is the rank's index along dp_shard, `parameters` the list of the model's parameters, if already
    made.

    Parameters of equal shape and cut, as in all layers, are computed once. A caller that queries many ranks passes
    `parameters` to list them only once.
    """
    parameters = parameters or ModelParameters.of(model)
    both = len(stages) > 1 and stages[0].first and stages[-1].last
    names = parameter_names_of_stages(model, [*stages]) + [tie.first for tie in model.ties() if both]
    shapes = {name: parameters.shapes[name] for name in names}
    name_by_shape = {(shape, parameters.cuts.get(name)): name for name, shape in shapes.items()}
    placements = place_parameters(
        {name: shapes[name] for name in name_by_shape.values()}, parameters.cuts, layout,
        Coordinate(0, 0, shard_index, 0), parameters.vocab_size,
    )  # fmt: skip
    return [replace(placements[name_by_shape[shapes[name], parameters.cuts.get(name)]], name=name) for name in names]


@dataclass(frozen=True)
class ModelParameters:
    """The shapes and cuts of all parameters of a model, listed once for several queries."""

    shapes: dict[str, Shape]
    cuts: Cuts
    vocab_size: int

    @classmethod
    def of(cls, model: ModelSettings) -> ModelParameters:
        return cls(model.weights(), model.cuts(), model.shape.vocab_size)


def needs_mask(model: ModelSettings, *, document_mask: bool) -> bool:
    """Return True if attention needs a mask beyond the kernel's own causal rule.

    A bidirectional model always needs a mask, because its rows can end early.
    """
    shape = model.shape
    return document_mask or not shape.causal or (shape.window is not None and shape.window < shape.seq_len)


def uses_block_masks(model: ModelSettings, *, on_gpu: bool) -> bool:
    """Return True if an attention mask, if present, is a block mask, whose kernels skip fully masked blocks.

    because: on a CPU the block-mask kernels have no backward, and on no device do they support dropout
    """
    return on_gpu and not model.uses_dropout and model.shape.head_width >= LEAST_HEAD_WIDTH


class Run(Protocol):
    """The properties of a run on which its activation memory depends."""

    @property
    def model(self) -> ModelSettings: ...
    @property
    def shape(self) -> ModelShape: ...
    @property
    def parallel(self) -> ParallelSettings: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def number_bytes(self) -> int: ...  # bytes of an element in the compute dtype
    @property
    def sequence_parts(self) -> int: ...  # sequence shards outside of attention and MLP
    @property
    def document_mask(self) -> bool: ...
    @property
    def has_mask(self) -> bool: ...  # attention receives a mask matrix
    @property
    def on_cpu(self) -> bool: ...
    @property
    def scored_share(self) -> float: ...  # share of tokens for which logits are computed

    def recompute_kind(self, block: int) -> str:
        """Return the recompute kind of the block with this number, `none` if it is not recomputed."""


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
        held_keys = max(shape.num_kv_heads, tp)  # because: with fewer heads than ranks, ranks hold copies
        self.heads, self.keys = (n * shape.head_width * e / tp for n in (shape.num_heads, held_keys))
        self.ffn = shape.ffn_width * e / tp
        self.up = self.ffn * (2 if shape.gated else 1)
        self.logits: float = -(-model.padded_vocab_size // tp) * e * run.scored_share
        self.rotary = getattr(model, "positions", "learned") == "rotary"
        self.parallel_block = getattr(model, "parallel_block", "no") != "no"
        self.post_norm = getattr(model, "norm_order", "pre") == "post"
        self.rms = getattr(model, "norm", "layernorm") == "rmsnorm"
        # dropout masks
        self.dropped = self.cut / e * (e if self.cpu else BOOL_BYTES) if model.uses_dropout else 0.0
        # because: a CPU's fused kernel has no dropout, so attention keeps whole score matrices
        self.scores = e * shape.seq_len * shape.num_heads / tp if self.cpu and model.uses_dropout else 0.0

    def norm_bytes(self) -> float:
        """Return the bytes per token that a norm layer keeps for backward: its input and statistics. Its output counts
        with the layer that reads it.
        """
        if self.rms and self.cpu:  # in fp32: the input, and the normalized input that multiplies the weight
            return (2 * self.cut * FP32_BYTES / self.run.number_bytes) + FP32_BYTES / self.run.sequence_parts
        statistics = self.run.number_bytes if self.cpu else FP32_BYTES
        return self.cut + (1 if self.rms else 2) * statistics / self.run.sequence_parts

    def block_bytes(self, recompute: str) -> float:
        """Return the bytes per token that a transformer block keeps for backward with the recompute kind `recompute`:
        `none`, `attention`, `operators` or `full`.
        """
        qkv, shape = self.heads + 2 * self.keys, self.run.shape
        softmax = self.scores or FP32_BYTES * shape.num_heads / self.run.parallel.tp  # a fused kernel keeps row sums
        if recompute == "full":
            return self.cut
        if recompute == "operators":  # matrix products before the tp reduction, and attention
            return self.cut + qkv + self.heads + softmax + self.whole + self.up + self.whole
        qkv_bytes = qkv + (self.heads + self.keys if self.rotary else 0.0)
        inside = qkv_bytes
        if recompute != "attention":
            inside = self.attention_input_bytes(qkv_bytes) + softmax + 2 * self.scores + self.mask_bytes()
        # because: a GPU's kernel recomputes silu(gate)
        mlp = self.up + self.ffn + (self.ffn if shape.gated and self.cpu else 0.0)
        norms = 1 if self.parallel_block else 2
        return norms * (self.norm_bytes() + self.cut) + inside + self.heads + mlp + 2 * self.dropped

    def attention_input_bytes(self, qkv_bytes: float) -> float:
        """Return the bytes per token of the inputs that attention's kernel keeps for backward: the `qkv_bytes` of
        queries, keys and values, or more if keys and values are repeated for several query heads.
        """
        if self.scores:
            return 3 * self.heads
        if self.run.has_mask and self.keys < self.heads:
            return 3 * self.heads if self.rotary else qkv_bytes + 2 * self.heads
        return qkv_bytes

    def mask_bytes(self) -> float:
        """Return the bytes of the attention mask in the compute dtype; fused attention creates a mask per block."""
        return 0.0 if self.scores else self.num_mask_elements * self.run.number_bytes / self.tokens

    @property
    def num_mask_elements(self) -> int:
        """The number of elements of a micro-batch's attention mask as a matrix; 0 without a mask."""
        shape = self.run.shape
        if not self.run.has_mask:
            return 0
        rows = shape.seq_len if shape.causal else 1
        samples = 1 if shape.causal and not self.run.document_mask else self.run.micro_batch
        return samples * rows * shape.seq_len

    def shared_bytes(self, stage: Stage) -> float:
        """Return the bytes per micro-batch, not per token, of tensors that a stage's blocks share, such as rotary
        angles and the mask, and of small tensors that BERT's heads and losses keep.
        """
        run, model = self.run, self.run.model
        rows = run.shape.seq_len * (run.micro_batch if run.document_mask else 1)
        total = 0.0
        if stage.layers and self.rotary:
            total += FP32_BYTES * run.shape.head_width * rows
        if run.shape.causal and any(run.recompute_kind(number) != "none" for number in stage.layers):
            total += BOOL_BYTES * self.num_mask_elements  # a bidirectional model's mask is a view of the batch
        if stage.first and not self.rotary and not run.document_mask:
            total += INT64_BYTES * rows
        if stage.last and isinstance(model, BertSettings):
            total += FP32_BYTES * (2 * run.micro_batch + 1) if model.pair_head else 0
            columns = -(-model.padded_vocab_size // run.parallel.tp)  # the mask of padded columns on the last tp rank
            total += BOOL_BYTES * columns if columns * run.parallel.tp > run.shape.vocab_size else 0
        return total

    def embedding_bytes(self) -> float:
        """Return the bytes per token that the first stage's embedding keeps for backward."""
        return (
            self.dropped + (self.norm_bytes() if self.post_norm else 0.0)
            + (INT64_BYTES + BOOL_BYTES if self.run.parallel.tp > 1 else 0.0)
        )  # fmt: skip

    def input_bytes(self, stage: Stage) -> float:
        """Return the bytes per token of the hidden states that a later stage receives, if they are kept in addition to
        what its blocks keep: only if the first norm keeps an fp32 copy instead of them. Otherwise return 0.
        """
        recompute = self.run.recompute_kind(stage.layers[0]) if stage.layers else "none"
        copied = self.rms and self.cpu and self.run.number_bytes < FP32_BYTES and recompute in ("none", "attention")
        return self.cut if copied else 0.0

    def head_bytes(self) -> float:
        """Return the bytes per token that the last stage's final norm, head and loss keep for backward, without the
        logits.
        """
        # because: over tp the loss keeps each row's label index and two sums
        loss = INT64_BYTES + 2 * FP32_BYTES if self.run.parallel.tp > 1 else 0.0
        final = 0.0 if self.post_norm else self.norm_bytes()
        if not isinstance(self.run.model, BertSettings):
            return final + self.cut + loss
        # a copy of the first tokens, and the pooler's output
        first_tokens = 2 * self.whole / self.run.shape.seq_len if self.run.model.pair_head else 0.0
        places, labels = INT64_BYTES / self.run.sequence_parts, INT64_BYTES
        scored_bytes = 2 * self.cut + self.norm_bytes() + self.cut + loss + places + labels
        return final + first_tokens + self.run.scored_share * scored_bytes

    def deferred_block_bytes(self) -> float:
        """Return the bytes per token that a block keeps from the input half to the weight half of a split backward: the
        inputs and output gradients of its linears.

        Matrix products on a sharded sequence each keep their own gathered copy; on a whole sequence they share equal
        tensors.
        """
        same_inputs = 2 * self.whole if self.parallel_block and self.run.sequence_parts == 1 else 0.0
        qkv = self.heads + 2 * self.keys
        return 2 * self.whole + self.heads + self.ffn + qkv + self.up + 2 * self.whole - same_inputs

    def deferred_head_bytes(self) -> float:
        """Return the bytes per token that the head keeps from the input half to the weight half of a split backward."""
        dense = 2 * self.cut if isinstance(self.run.model, BertSettings) else 0.0
        return self.run.scored_share * (self.whole + dense)

    def activation_bytes(self, stage: Stage) -> ActivationBytes:
        """Return the bytes of activations that a micro-batch keeps in this pipeline stage until its backward."""
        blocks = Counter(map(self.run.recompute_kind, stage.layers))  # because: many blocks use the same recompute kind
        hidden = sum(num_blocks * self.block_bytes(recompute) for recompute, num_blocks in blocks.items())
        deferred = len(stage.layers) * self.deferred_block_bytes()
        hidden += self.embedding_bytes() if stage.first else self.input_bytes(stage)
        if stage.last:
            hidden += self.head_bytes()
            deferred += self.deferred_head_bytes()
        n = self.tokens
        logits = n * self.logits if stage.last else 0.0
        return ActivationBytes(n * hidden + self.shared_bytes(stage), logits, n * deferred)
