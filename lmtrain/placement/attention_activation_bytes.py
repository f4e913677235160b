"""The memory of attention in bytes: what a layer keeps of queries, keys, values, scores and masks. Torch-free.

Called by weight_and_activation_bytes, and by code that asks which form a mask has. Layers of a pattern differ: each
kind has its own sizes.
"""

from __future__ import annotations

from typing import Any, Protocol

from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.spec import LayerKind, ModelShape

FP32_BYTES, BOOL_BYTES = 4, 1
LEAST_HEAD_WIDTH = 16  # because: the matrix products in flex_attention's kernels need at least this size


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
    def on_cpu(self) -> bool: ...
    @property
    def scored_share(self) -> float: ...  # share of tokens for which logits are computed

    def recompute_kind(self, block: int) -> str:
        """Return the recompute kind of the block with this number, `none` if it is not recomputed."""


def needs_mask(model: ModelSettings, *, document_mask: bool, kind: LayerKind | None = None) -> bool:
    """Return True if attention needs an explicit mask in addition to the causal rule that kernels have built in: for
    layers of this `kind`, or for any layer of the model if `kind` is None. Document masks, bidirectional models and
    windows shorter than the sequence need one.

    A bidirectional model always needs a mask, because its rows can end early.
    """
    shape = model.shape
    has_window = any(each.window for each in ([kind] if kind else model.layer_kinds))
    return document_mask or not shape.causal or (has_window and shape.window_in(shape.seq_len) < shape.seq_len)


def uses_block_masks(model: ModelSettings, *, on_gpu: bool) -> bool:
    """Return True if an attention mask, if present, is a block mask, whose kernels skip fully masked blocks.

    because: on a CPU the block-mask kernels have no backward, and on no device do they support dropout
    """
    return on_gpu and not model.uses_dropout and model.shape.head_width >= LEAST_HEAD_WIDTH


def holds_scores(model: ModelSettings, *, on_cpu: bool) -> bool:
    """Return True if attention holds the matrices of all scores. Capped scores need block masks to be computed by a
    fused kernel, and a CPU's fused kernel has no dropout.
    """
    return (on_cpu and model.uses_dropout) or (model.caps_scores and not uses_block_masks(model, on_gpu=not on_cpu))


class AttentionSizes:
    """The sizes of what the attention of a layer of this kind keeps for backward on a rank. Results are bytes per
    token, unless said otherwise.
    """

    def __init__(self, run: Run, kind: LayerKind) -> None:
        shape, tp, model = run.shape, run.parallel.tp, run.model
        self.run, self.kind, self.number_bytes = run, kind, run.number_bytes
        # because: with fewer heads of keys than ranks, ranks hold copies
        self.num_heads, self.num_keys = shape.num_heads / tp, max(shape.num_kv_heads, tp) / tp
        self.heads, self.keys = (n * shape.head_width * run.number_bytes for n in (self.num_heads, self.num_keys))
        self.qkv = self.heads + 2 * self.keys
        settings: Any = model
        self.norm = getattr(settings, "qk_norm", "none")
        self.has_norm_weight = getattr(settings, "norm_weight", "ones") != "none"
        is_masked = needs_mask(model, document_mask=run.document_mask, kind=kind)
        self.has_mask = is_masked and not uses_block_masks(model, on_gpu=not run.on_cpu)  # a mask as a matrix
        self.holds_scores = holds_scores(model, on_cpu=run.on_cpu)
        self.caps_scores = self.holds_scores and model.caps_scores

    @property
    def has_own_queries(self) -> bool:
        """True if queries and keys are tensors of their own, and no views of the fused projections."""
        return self.kind.rotary or self.norm != "none"

    def core_bytes(self) -> float:
        """Return the bytes per token that attention keeps for backward between its first and its last linear layer, if
        nothing is recomputed.
        """
        return self._core_input_bytes() + self.norm_bytes() + self.score_bytes() + self.mask_bytes()

    def projection_bytes(self) -> float:
        """Return the bytes per token that attention keeps for backward if its core, from scores to the weighted sum of
        values, is recomputed: queries, keys and values, and what their norms keep.
        """
        own = self.heads + self.keys if self.has_own_queries else 0.0
        return self.qkv + own + self.norm_bytes()

    def product_bytes(self) -> float:
        """Return the bytes per token of the results of attention's matrix products: queries, keys and values, scores,
        and the weighted sums of values. The last linear layer is not included.
        """
        scores = self.number_bytes * self.num_scores if self.holds_scores else FP32_BYTES * self.num_heads
        return self.qkv + self.heads + scores

    @property
    def num_scores(self) -> float:
        """The number of scores per token on this rank."""
        return self.run.shape.seq_len * self.num_heads

    def _core_input_bytes(self) -> float:
        """Return the bytes per token that the core of attention (from scores to the weighted sum of values) keeps of
        its queries, keys and values. The whole fused projections are counted if any of these is a view of them, and
        repeated copies of keys and values if the kernel needs them.
        """
        if self.holds_scores and not self.caps_scores:
            views = self.norm != "none" and not self._norm_copies
            return 3 * self.heads + (self.qkv if views else 0.0)
        is_copied = self.caps_scores and self.run.micro_batch > 1  # because: a product of matrices joins their batches
        is_repeated = (self.has_mask or self.caps_scores) and self.keys < self.heads
        queries = self.heads if self.has_own_queries or is_copied else 0.0
        keys = self.heads if is_copied or is_repeated else self.keys if self.has_own_queries else 0.0
        values = self.heads if is_copied or is_repeated else 0.0
        views = not (queries and keys and values) or (self.norm != "none" and not self._norm_copies)
        return queries + keys + values + (self.qkv if views else 0.0)

    @property
    def _norm_copies(self) -> bool:
        """True if the norms of queries and keys keep an fp32 copy of them, and not a view."""
        is_split = self.norm == "whole" and self.run.parallel.tp > 1
        return (self.run.on_cpu or is_split) and self.number_bytes < FP32_BYTES

    def norm_bytes(self) -> float:
        """Return the bytes per token that the norms of queries and keys keep for backward in addition to their output:
        an fp32 copy of their input, a number for each mean of squares, and the normalized input. Return 0 for models
        without these norms.
        """
        if self.norm == "none":
            return 0.0
        copies = (self.heads + self.keys) * FP32_BYTES / self.number_bytes if self._norm_copies else 0.0
        roots = FP32_BYTES * (2 if self.norm == "whole" else self.num_heads + self.num_keys)
        return copies + roots + (self.heads + self.keys if self.has_norm_weight else 0.0)

    def score_bytes(self) -> float:
        """Return the bytes per token that the softmax over attention scores keeps for backward: one number for each
        head in a fused kernel, otherwise matrices of all scores.
        """
        if not self.holds_scores:
            return FP32_BYTES * self.num_heads
        e, has_dropout = self.number_bytes, self.run.model.uses_dropout
        if not self.caps_scores:
            return 3 * e * self.num_scores
        # tanh, the softmax in fp32, and what multiplies the values: the softmax in the compute dtype, or dropout's
        # mask and result
        shares = 2 * e if has_dropout else 0 if e == FP32_BYTES else e
        return (e + FP32_BYTES + shares) * self.num_scores

    def mask_bytes(self) -> float:
        """Return the bytes per token of the mask matrix that each layer makes and keeps for itself: in the compute
        dtype for fused attention, as bools for capped scores, 0 for other attention.
        """
        if self.caps_scores:
            shape = self.run.shape
            own = shape.seq_len**2 if shape.causal and not self.has_mask else 0
            return BOOL_BYTES * (self.num_mask_elements + own) / self._num_tokens
        return 0.0 if self.holds_scores else self.num_mask_elements * self.number_bytes / self._num_tokens

    @property
    def _num_tokens(self) -> int:
        return self.run.micro_batch * self.run.shape.seq_len

    @property
    def num_mask_elements(self) -> int:
        """Number of elements of the attention mask matrix for one micro-batch; 0 if there is no mask or it is no
        matrix.
        """
        shape = self.run.shape
        if not self.has_mask:
            return 0
        rows = shape.seq_len if shape.causal else 1
        samples = 1 if shape.causal and not self.run.document_mask else self.run.micro_batch
        return samples * rows * shape.seq_len
