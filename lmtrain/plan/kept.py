"""Bytes that one microbatch keeps for its backward in a stage of ours: the layers' own saved tensors, one by one.

Called by ranks. Said of the layers as models and parallel run them, kernel by kernel; a compiler keeps no more. Where
kernels differ the device decides: a GPU's norms are one kernel each, a CPU's RMSNorm is several in fp32. tests/layouts
compares every term with real processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmtrain.models.bert_settings import BertSettings
from lmtrain.placement.memory import FP32_BYTES
from lmtrain.placement.stages import Stage
from lmtrain.plan.ours import Planned

INT64_BYTES, BOOL_BYTES = 8, 1


@dataclass(frozen=True)
class Kept:
    """Of one microbatch, between two actions of a schedule."""

    hidden: float = 0.0  # from forward to backward, or to its first half
    logits: float = 0.0  # and then their gradient until the second half
    later: float = 0.0  # from the first half of a backward to the second: inputs of products and gradients of outputs


class Layers:
    """Sizes of one rank's tensors, in bytes of a token, for a run's widths, cuts and numbers."""

    def __init__(self, run: Planned) -> None:
        self.run, shape, tp, e = run, run.shape, run.parallel.tp, run.number_bytes
        model: Any = run.model
        self.tokens = run.micro_batch * shape.seq_len
        self.cpu = run.compute.device == "cpu"
        self.whole = shape.width * e
        self.cut = self.whole / run.sequence_parts  # outside of attention and MLP
        self.heads, self.keys = (n * shape.head_width * e / tp for n in (shape.num_heads, shape.num_kv_heads))
        self.ffn = shape.ffn_width * e / tp
        self.up = self.ffn * (2 if shape.gated else 1)
        self.logits: float = -(-model.padded_vocab_size // tp) * e
        self.rotary = getattr(model, "positions", "learned") == "rotary"
        self.parallel_block = getattr(model, "parallel_block", False)
        self.post_norm = getattr(model, "norm_order", "pre") == "post"
        self.rms = getattr(model, "norm", "layernorm") == "rmsnorm"
        kept = self.cut / e * (e if self.cpu else BOOL_BYTES)  # of a number that is dropped or not
        self.dropped = kept if model.uses_dropout else 0.0
        # because: a CPU's kernel does not drop, and attention is then made of whole scores
        self.scores = e * shape.seq_len * shape.num_heads / tp if self.cpu and model.uses_dropout else 0.0

    def norm(self) -> float:
        """Its input and statistics; its output belongs to whoever takes it."""
        cut = self.cut
        if self.rms and self.cpu:  # in fp32: the input, and what the weight is multiplied with
            return (2 * cut * FP32_BYTES / self.run.number_bytes) + FP32_BYTES / self.run.sequence_parts
        statistics = self.run.number_bytes if self.cpu else FP32_BYTES
        return cut + (1 if self.rms else 2) * statistics / self.run.sequence_parts

    def block(self, number: int) -> float:
        return self.block_with(self.run.recompute.kind if self.run.recomputes(number) else "none")

    def block_with(self, again: str) -> float:
        qkv, shape = self.heads + 2 * self.keys, self.run.shape
        softmax = self.scores or FP32_BYTES * shape.num_heads / self.run.parallel.tp  # a fused one keeps its sums
        if again == "full":
            return self.cut
        if again == "operators":  # products before tp sums them, and attention
            return self.cut + qkv + self.heads + softmax + self.whole + self.up + self.whole
        turned = self.heads + self.keys if self.rotary else 0.0
        # because: turned queries lie head by head, and so does what attention makes of them: the product takes a copy
        attended = self.heads * (2 if self.rotary else 1) + softmax + 2 * self.scores + self.mask()
        if again == "attention":
            attended = self.heads
        mlp = self.up + self.ffn + (self.ffn if shape.gated else 0.0)
        norms = 1 if self.parallel_block else 2
        return norms * (self.norm() + self.cut) + qkv + turned + attended + mlp + 2 * self.dropped

    def mask(self) -> float:
        """Of who may look at whom, in the numbers that compute: attention makes one for each block."""
        shape = self.run.shape
        if not self.run.has_mask:
            return 0.0
        rows = shape.seq_len if shape.causal else 1
        samples = 1 if shape.causal and not self.run.document_mask else self.run.micro_batch
        return samples * rows * shape.seq_len * self.run.number_bytes / self.tokens

    def embedding(self) -> float:
        """Of the first stage."""
        found = self.dropped + (self.norm() if self.post_norm else 0.0)
        return found + (INT64_BYTES + BOOL_BYTES if self.run.parallel.tp > 1 else 0.0)

    def received(self, stage: Stage) -> float:
        """By a later stage: the first norm keeps it, unless it makes an fp32 copy of it for itself."""
        again = self.run.recompute.kind if stage.layers and self.run.recomputes(stage.layers[0]) else "none"
        copied = self.rms and self.cpu and self.run.number_bytes < FP32_BYTES and again in ("none", "attention")
        return self.cut if copied else 0.0

    def head(self) -> float:
        """Of the last stage, the logits left out."""
        # because: over tp the loss keeps where a label stands and two sums of each row
        loss = INT64_BYTES + BOOL_BYTES + 2 * FP32_BYTES if self.run.parallel.tp > 1 else 0.0
        final = 0.0 if self.post_norm else self.norm()
        if not isinstance(self.run.model, BertSettings):
            return final + self.cut + loss
        first_tokens = self.whole / self.run.shape.seq_len if self.run.model.pair_head else 0.0
        return final + 2 * self.cut + self.norm() + self.cut + first_tokens + loss

    def later_of_block(self) -> float:
        """Products over a cut sequence keep it whole, each its own copy; over a whole one they share what is equal."""
        alike = 2 * self.whole if self.parallel_block and self.run.sequence_parts == 1 else 0.0
        qkv = self.heads + 2 * self.keys
        return 2 * self.whole + self.heads + self.ffn + qkv + self.up + 2 * self.whole - alike

    def later_of_head(self) -> float:
        dense = 2 * self.cut if isinstance(self.run.model, BertSettings) else 0.0
        return self.whole + dense


def kept_of(run: Planned, stage: Stage) -> Kept:
    """What a microbatch leaves in this stage."""
    layers = Layers(run)
    hidden = sum(layers.block(number) for number in stage.layers)
    later = len(stage.layers) * layers.later_of_block()
    hidden += layers.embedding() if stage.first else layers.received(stage)
    if stage.last:
        hidden += layers.head()
        later += layers.later_of_head()
    logits = layers.logits if stage.last else 0.0
    angles = FP32_BYTES * run.shape.head_width * run.shape.seq_len if layers.rotary and stage.layers else 0
    places = INT64_BYTES * run.shape.seq_len if stage.first and not layers.rotary else 0
    n = layers.tokens
    return Kept(n * hidden + angles + places, n * logits, n * later)
