"""What a rank of ours holds, in bytes: weights, and what a microbatch keeps for its backward in a stage. Torch-free.

Called by preflight's table of a layout, and by whoever plans a run. What a microbatch keeps is said of the layers as
models and parallel run them, their own saved tensors one by one, kernel by kernel; a compiler keeps no more. Where
kernels differ the device decides: a GPU's norms are one kernel each, a CPU's RMSNorm is several in fp32. tests/layouts
compares every term with real processes.
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
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.placement.places import Place, Shape, Stage, names_of_rank, place_all
from lmtrain.spec import Cuts, ModelShape

FP32_BYTES, INT64_BYTES, BOOL_BYTES = 4, 8, 1
LEAST_HEAD_WIDTH = 16  # because: flex_attention's kernels are made of products that have no smaller side


@dataclass(frozen=True)
class RankBytes:
    """What weights cost one rank, in bytes."""

    masters: int  # fp32 weights that the optimizer owns
    work: int  # weights that compute, where they are not the masters themselves
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.masters + self.work + self.gradients + self.optimizer


@dataclass(frozen=True)
class Numbers:
    """How many numbers some weights are on one rank."""

    parts: int = 0  # of this tensor-parallel rank
    shards: int = 0  # of these, its share, padded until all have the same
    slots: int = 0  # that the optimizer remembers, which are not padded
    early: int = 0  # of the parts: what is no product's weight, so that the first half of a backward has its gradient

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(
            self.parts + other.parts, self.shards + other.shards, self.slots + other.slots, self.early + other.early,
        )  # fmt: skip

    def __sub__(self, other: Numbers) -> Numbers:
        return Numbers(
            self.parts - other.parts, self.shards - other.shards, self.slots - other.slots, self.early - other.early,
        )  # fmt: skip


def count(
    places: Iterable[Place], layout: Layout, num_slots: Callable[[str, Shape], int] = lambda name, shape: 2
) -> Numbers:
    """`num_slots`: how many tensors the optimizer keeps for a parameter of this name and whole shape."""
    places = list(places)
    return Numbers(
        sum(math.prod(place.part_shape) for place in places),
        sum(math.prod((-(-place.part_shape[0] // layout.dp_shard), *place.part_shape[1:])) for place in places),
        sum(num_slots(place.name, place.global_shape) * math.prod(place.local_shape) for place in places),
        sum(
            math.prod(place.part_shape)
            for place in places if len(place.part_shape) == 1 or place.name.startswith("embedding.")
        ),
    )  # fmt: skip


def rank_bytes(held: Numbers, layout: Layout, *, zero: int, work_bytes: int) -> RankBytes:
    """Held between two microbatches of a step, the moment that tells the levels apart.

    zero 0 and 1 keep whole gathered weights and whole gradients; 2 keeps shards of gradients; 3 keeps shards of both,
    and gathers a block at a time. `work_bytes` is the size of a number that computes.
    """
    optimizer = FP32_BYTES * held.slots
    if layout.dp == 1:
        work = 0 if work_bytes == FP32_BYTES else work_bytes * held.parts
        return RankBytes(FP32_BYTES * held.parts, work, FP32_BYTES * held.parts, optimizer)
    return RankBytes(
        masters=FP32_BYTES * held.shards,
        work=work_bytes * held.shards * layout.dp_shard if zero < 3 else 0,
        gradients=FP32_BYTES * (held.parts if zero < 2 else held.shards),
        optimizer=optimizer,
    )


def places_held(
    model: ModelSettings, stages: Sequence[Stage], layout: Layout, shard: int, weights: Weights | None = None
) -> list[Place]:
    """Return the weights of a rank's stages; a weight that two stages hold copies of is there twice.

    Those of equal shape and cut, as in all layers, are worked out once. `weights`, where there are many ranks to ask
    for.
    """
    weights = weights or Weights.of(model)
    both = len(stages) > 1 and stages[0].first and stages[-1].last
    names = names_of_rank(model, [*stages]) + [tie.first for tie in model.ties() if both]
    shapes = {name: weights.shapes[name] for name in names}
    alike = {(shape, weights.cuts.get(name)): name for name, shape in shapes.items()}
    places = place_all(
        {name: shapes[name] for name in alike.values()}, weights.cuts, layout, Coordinate(0, 0, shard, 0),
        weights.vocab_size,
    )  # fmt: skip
    return [replace(places[alike[shapes[name], weights.cuts.get(name)]], name=name) for name in names]


@dataclass(frozen=True)
class Weights:
    """All of a model's, listed once."""

    shapes: dict[str, Shape]
    cuts: Cuts
    vocab_size: int

    @classmethod
    def of(cls, model: ModelSettings) -> Weights:
        return cls(model.weights(), model.cuts(), model.shape.vocab_size)


def needs_mask(model: ModelSettings, *, document_mask: bool) -> bool:
    """Return whether attention needs a mask beyond a kernel's own causal rule.

    To a model that sees both sides it always does: its rows end early.
    """
    shape = model.shape
    return document_mask or not shape.causal or (shape.window is not None and shape.window < shape.seq_len)


def of_blocks(model: ModelSettings, *, on_gpu: bool) -> bool:
    """Return whether a mask is of blocks, whose kernels skip blocks that are masked whole.

    because: on a CPU they have no backward, and they drop nothing, as dropout asks.
    """
    return on_gpu and not model.uses_dropout and model.shape.head_width >= LEAST_HEAD_WIDTH


class Run(Protocol):
    """What of a run its activations depend on."""

    @property
    def model(self) -> ModelSettings: ...
    @property
    def shape(self) -> ModelShape: ...
    @property
    def parallel(self) -> ParallelSettings: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def number_bytes(self) -> int: ...  # of a number that computes
    @property
    def sequence_parts(self) -> int: ...  # cuts of the sequence, outside of attention and MLP
    @property
    def document_mask(self) -> bool: ...
    @property
    def has_mask(self) -> bool: ...  # attention is given a matrix of who may look at whom
    @property
    def on_cpu(self) -> bool: ...
    @property
    def scored_share(self) -> float: ...  # of the tokens, those of which scores over the vocabulary are made

    def again(self, block: int) -> str:
        """Return which recompute kind a block uses."""


@dataclass(frozen=True)
class Kept:
    """Of one microbatch, between two actions of a schedule."""

    hidden: float = 0.0  # from forward to backward, or to its first half
    logits: float = 0.0  # and then their gradient until the second half
    later: float = 0.0  # from the first half of a backward to the second: inputs of products and gradients of outputs


class Layers:
    """Sizes of one rank's tensors, in bytes of a token, for a run's widths, cuts and numbers."""

    def __init__(self, run: Run) -> None:
        self.run, shape, tp, e = run, run.shape, run.parallel.tp, run.number_bytes
        model: Any = run.model
        self.tokens = run.micro_batch * shape.seq_len
        self.cpu = run.on_cpu
        self.whole = shape.width * e
        self.cut = self.whole / run.sequence_parts  # outside of attention and MLP
        self.heads, self.keys = (n * shape.head_width * e / tp for n in (shape.num_heads, shape.num_kv_heads))
        self.ffn = shape.ffn_width * e / tp
        self.up = self.ffn * (2 if shape.gated else 1)
        self.logits: float = -(-model.padded_vocab_size // tp) * e * run.scored_share
        self.rotary = getattr(model, "positions", "learned") == "rotary"
        self.parallel_block = getattr(model, "parallel_block", False)
        self.post_norm = getattr(model, "norm_order", "pre") == "post"
        self.rms = getattr(model, "norm", "layernorm") == "rmsnorm"
        # of a number that is dropped or not
        self.dropped = self.cut / e * (e if self.cpu else BOOL_BYTES) if model.uses_dropout else 0.0
        # because: a CPU's kernel does not drop, and attention is then made of whole scores
        self.scores = e * shape.seq_len * shape.num_heads / tp if self.cpu and model.uses_dropout else 0.0

    def norm(self) -> float:
        """Return what a norm keeps: its input and statistics; its output belongs to its user."""
        if self.rms and self.cpu:  # in fp32: the input, and what the weight is multiplied with
            return (2 * self.cut * FP32_BYTES / self.run.number_bytes) + FP32_BYTES / self.run.sequence_parts
        statistics = self.run.number_bytes if self.cpu else FP32_BYTES
        return self.cut + (1 if self.rms else 2) * statistics / self.run.sequence_parts

    def block_with(self, again: str) -> float:
        qkv, shape = self.heads + 2 * self.keys, self.run.shape
        softmax = self.scores or FP32_BYTES * shape.num_heads / self.run.parallel.tp  # a fused one keeps its sums
        if again == "full":
            return self.cut
        if again == "operators":  # products before tp sums them, and attention
            return self.cut + qkv + self.heads + softmax + self.whole + self.up + self.whole
        given = qkv + (self.heads + self.keys if self.rotary else 0.0)
        inside = given if again == "attention" else self.taken(given) + softmax + 2 * self.scores + self.mask()
        # because: a GPU's kernel works silu(gate) out again
        mlp = self.up + self.ffn + (self.ffn if shape.gated and self.cpu else 0.0)
        norms = 1 if self.parallel_block else 2
        return norms * (self.norm() + self.cut) + inside + self.heads + mlp + 2 * self.dropped

    def taken(self, given: float) -> float:
        """Return what attention's kernel keeps: queries, keys and values as given, or copies with repeated keys."""
        if self.scores:
            return 3 * self.heads
        if self.run.has_mask and self.keys < self.heads:
            return 3 * self.heads if self.rotary else given + 2 * self.heads
        return given

    def mask(self) -> float:
        """Return the bytes of an attention mask, of which fused attention makes one for each block."""
        return 0.0 if self.scores else self.mask_numbers * self.run.number_bytes / self.tokens

    @property
    def mask_numbers(self) -> int:
        """The numbers in a micro-batch's mask matrix, 0 without one."""
        shape = self.run.shape
        if not self.run.has_mask:
            return 0
        rows = shape.seq_len if shape.causal else 1
        samples = 1 if shape.causal and not self.run.document_mask else self.run.micro_batch
        return samples * rows * shape.seq_len

    def shared(self, stage: Stage) -> float:
        """Bytes of a microbatch, and not of a token: what blocks share, and what the loss of pairs keeps."""
        run, model = self.run, self.run.model
        rows = run.shape.seq_len * (run.micro_batch if run.document_mask else 1)
        found = 0.0
        if stage.layers and self.rotary:
            found += FP32_BYTES * run.shape.head_width * rows
        if run.shape.causal and any(run.again(number) != "none" for number in stage.layers):
            found += BOOL_BYTES * self.mask_numbers  # the others' is the batch's own
        if stage.first and not self.rotary and not run.document_mask:
            found += INT64_BYTES * rows
        if stage.last and isinstance(model, BertSettings):
            found += FP32_BYTES * (2 * run.micro_batch + 1) if model.pair_head else 0
            columns = -(-model.padded_vocab_size // run.parallel.tp)  # the last rank knows which of them are none
            found += BOOL_BYTES * columns if columns * run.parallel.tp > run.shape.vocab_size else 0
        return found

    def embedding(self) -> float:
        """Return what the embedding keeps, on the first stage."""
        return (
            self.dropped + (self.norm() if self.post_norm else 0.0)
            + (INT64_BYTES + BOOL_BYTES if self.run.parallel.tp > 1 else 0.0)
        )  # fmt: skip

    def received(self, stage: Stage) -> float:
        """Return what a later stage keeps of its input, which the first norm keeps unless it makes an fp32 copy."""
        again = self.run.again(stage.layers[0]) if stage.layers else "none"
        copied = self.rms and self.cpu and self.run.number_bytes < FP32_BYTES and again in ("none", "attention")
        return self.cut if copied else 0.0

    def head(self) -> float:
        """Return what the head keeps, on the last stage, without logits."""
        # because: over tp the loss keeps where a label stands and two sums of each row
        loss = INT64_BYTES + 2 * FP32_BYTES if self.run.parallel.tp > 1 else 0.0
        final = 0.0 if self.post_norm else self.norm()
        if not isinstance(self.run.model, BertSettings):
            return final + self.cut + loss
        # a copy of them, and what the pooler makes of it
        first_tokens = 2 * self.whole / self.run.shape.seq_len if self.run.model.pair_head else 0.0
        places, labels = INT64_BYTES / self.run.sequence_parts, INT64_BYTES
        scored = 2 * self.cut + self.norm() + self.cut + loss + places + labels
        return final + first_tokens + self.run.scored_share * scored

    def later_of_block(self) -> float:
        """Products over a cut sequence keep it whole, each its own copy; over a whole one they share what is equal."""
        alike = 2 * self.whole if self.parallel_block and self.run.sequence_parts == 1 else 0.0
        qkv = self.heads + 2 * self.keys
        return 2 * self.whole + self.heads + self.ffn + qkv + self.up + 2 * self.whole - alike

    def later_of_head(self) -> float:
        dense = 2 * self.cut if isinstance(self.run.model, BertSettings) else 0.0
        return self.run.scored_share * (self.whole + dense)

    def kept(self, stage: Stage) -> Kept:
        """Return what a micro-batch keeps in a stage."""
        blocks = Counter(map(self.run.again, stage.layers))  # because: many are alike
        hidden = sum(count * self.block_with(again) for again, count in blocks.items())
        later = len(stage.layers) * self.later_of_block()
        hidden += self.embedding() if stage.first else self.received(stage)
        if stage.last:
            hidden += self.head()
            later += self.later_of_head()
        n = self.tokens
        return Kept(n * hidden + self.shared(stage), n * self.logits if stage.last else 0.0, n * later)
