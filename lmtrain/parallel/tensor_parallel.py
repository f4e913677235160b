"""Tensor and sequence parallelism: replaces the modules listed in a model's cuts by modules with this rank's part.

Called by build_parallel on a model without memory, and for the objective's loss; by inference for scores. Depends on a
model only through `cuts()`: names of parameters and paths of modules stay, so that a state dict, initial values and
ties refer to the same names, with smaller shapes.

COLUMN cuts each section separately (a rank's qkv is [q_t | k_t | v_t], its SwiGLU input [gate_t | up_t]) and ROW cuts
the inputs to match. With `sequence_parallel`, everything between a ROW and the next COLUMN is a sequence shard: norms,
residual and dropout cost 1/tp, and uncut weights get partial gradients, which are summed over tp once per step.

VOCAB cuts embedding rows and head rows, and its cross-entropy never holds whole logits. Each rank holds an equal range
of rows; rows after the true vocabulary are padding, have logits of -inf and get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.batch import IGNORED
from lmtrain.errors import LayoutError
from lmtrain.kernels.cross_entropy import NO_COLUMN, logits_gradient, row_statistics
from lmtrain.models.initial_weights import apply_ties
from lmtrain.models.layers.attention import Attention
from lmtrain.models.layers.norms import WholeNorm, scaled
from lmtrain.models.layers.output_heads import FirstTokenOutput, Head, padded_bias
from lmtrain.models.objectives.cross_entropy import with_sample_sums, with_z_loss
from lmtrain.parallel.linear_forward_backward_products import SummingModule
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.tp_linears_and_collectives import (
    all_reduce,
    broadcast_from_first,
    column_linear,
    gather_stack,
    row_linear,
    sum_of_parts_and_gradients,
    sum_parts,
)
from lmtrain.placement.layers_and_shards_of_ranks import part_shape
from lmtrain.spec import Cut, LanguageModel, Split

HEAD_ROWS = 256  # because: for GPT-2's vocabulary the fp32 logits are 50 MB, and the head's product stays efficient
EXP_ROWS = 16  # because: the intermediate results of 16 rows fit a core's cache


def apply_tensor_parallel(model: LanguageModel, tp: Axis, *, sequence_parallel: bool) -> str | None:
    """Replace the modules of a model, in place, by modules with this tensor-parallel rank's part of their weights.
    Return a line for the log, or None if the axis `tp` has a single rank. The layout was checked against the model's
    settings (`check_layout`).
    """
    if tp.size == 1:
        return None
    assert isinstance(model, nn.Module)
    shape, cuts, num_sharded = model.shape, model.cuts(), 0
    for module in model.modules():
        if isinstance(module, Attention):
            module.queries_per_key = shape.num_heads // max(shape.num_kv_heads, tp.size)
    for path, module in list(model.named_modules()):
        cut = cuts.get(f"{path}.weight", Cut(Split.NONE))
        replacement = _sharded_module(module, cut, tp, sequence_parallel)
        if replacement is not None:
            model.set_submodule(path, replacement)
            num_sharded += cut.split is not Split.NONE
    apply_ties(model)
    return f"tensor parallel over {tp.size}: {num_sharded} modules{', sequence parallel' * sequence_parallel}"


def _sharded_module(module: nn.Module, cut: Cut, tp: Axis, sequence_parallel: bool) -> nn.Module | None:
    """Return the module that replaces `module` on this tensor-parallel rank, or None if it stays. `cut` says how its
    weight is split. Raise LayoutError if a module of this type cannot be split that way.
    """
    match cut.split, module:
        case _, WholeNorm():
            return SplitWholeNorm(module, cut, tp)
        case Split.COLUMN, nn.Linear():
            return ColumnLinear(module, cut, tp, sequence_parallel=sequence_parallel)
        case Split.ROW, nn.Linear():
            return RowLinear(module, cut, tp, sequence_parallel=sequence_parallel)
        case Split.VOCAB, nn.Embedding():
            return VocabEmbedding(module, cut, tp, sequence_parallel=sequence_parallel)
        case Split.VOCAB, Head():
            return VocabHead(module, cut, tp, sequence_parallel=sequence_parallel)
        case Split.NONE, nn.Embedding() if sequence_parallel:
            return SequenceEmbedding(module, tp)
        case Split.NONE, FirstTokenOutput() if sequence_parallel:
            return BroadcastFromFirst(tp)
        case Split.NONE, _:
            return None
    raise LayoutError(
        f"parallel.tp={tp.size} cannot split a module of type {type(module).__name__} by {cut.split.value}. Give the "
        "model a Linear, an Embedding or a Head there."
    )


def _new_part(parameter: Tensor, cut: Cut, axis: Axis) -> nn.Parameter:
    """Return an uninitialized parameter of the shape of this rank's part of `parameter`."""
    return nn.Parameter(parameter.new_empty(part_shape(parameter.shape, cut, axis.size)))


class ColumnLinear(SummingModule):
    """A linear with this rank's part of the outputs, over the whole sequence. Every section must be divisible by tp, or
    have fewer heads than ranks, which then hold copies.
    """

    def __init__(self, linear: nn.Linear, cut: Cut, axis: Axis, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.weight = _new_part(linear.weight, cut, axis)
        self.bias = None if linear.bias is None else _new_part(linear.bias, cut, axis)

    def forward(self, x_BTD: Tensor, *, add_bias: bool = True) -> Tensor:
        return column_linear(
            x_BTD, self.weight, self.bias if add_bias else None, self.axis,
            sequence_parallel=self.sequence_parallel, gradient_total=self.gradient_total,
        )  # fmt: skip


class RowLinear(SummingModule):
    """A linear over this rank's part of the inputs; the ranks' outputs are summed, then the bias is added once."""

    def __init__(self, linear: nn.Linear, cut: Cut, axis: Axis, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.weight = _new_part(linear.weight, cut, axis)
        self.bias = linear.bias

    def forward(self, x_BTF: Tensor) -> Tensor:
        return row_linear(
            x_BTF, self.weight, self.bias, self.axis,
            sequence_parallel=self.sequence_parallel, gradient_total=self.gradient_total,
        )  # fmt: skip


class SplitWholeNorm(nn.Module):
    """A norm over all heads of queries or keys, of which this rank has a part: ranks add their sums of squares."""

    def __init__(self, norm: WholeNorm, cut: Cut, axis: Axis) -> None:
        super().__init__()
        self.axis, self.eps, self.form = axis, norm.eps, norm.form
        self.weight = None if norm.weight is None else _new_part(norm.weight, cut, axis)

    def forward(self, x_BTHK: Tensor) -> Tensor:
        x_BTN = x_BTHK.flatten(2)
        exact_BTN = x_BTN.to(torch.promote_types(x_BTN.dtype, torch.float32))
        squares_BT1 = sum_of_parts_and_gradients(exact_BTN.square().sum(-1, keepdim=True), self.axis)
        root_BT1 = torch.rsqrt(squares_BT1 / (x_BTN.shape[-1] * self.axis.size) + self.eps)
        return scaled((exact_BTN * root_BT1).type_as(x_BTN), self.weight, self.form).view_as(x_BTHK)


class SequenceEmbedding(nn.Module):
    """A whole embedding table (positions, segments), read for this rank's shard of the sequence."""

    def __init__(self, embedding: nn.Embedding, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of this rank's shard of the sequence; `ids` are those of the whole sequence, in their
        last dim.
        """
        length = ids.shape[-1] // self.axis.size
        return nn.functional.embedding(ids.narrow(-1, self.axis.index * length, length), self.weight)


class BroadcastFromFirst(nn.Module):
    """A module that broadcasts the first rank's value: only its sequence shard contains the first token."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return broadcast_from_first(x, self.axis)


class VocabEmbedding(nn.Module):
    """An embedding with this rank's rows: other tokens give 0, and the sum over ranks is the embedding."""

    def __init__(self, embedding: nn.Embedding, cut: Cut, axis: Axis, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.weight = _new_part(embedding.weight, cut, axis)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        row_BT, mine_BT = _local_rows(tokens_BT, self.weight.shape[0], self.axis)
        x_BTD = F.embedding(row_BT, self.weight).masked_fill(~mine_BT.unsqueeze(-1), 0.0)
        return sum_parts(x_BTD, self.axis, sequence_parallel=self.sequence_parallel)


class VocabHead(SummingModule):
    """A head with this rank's tokens. `forward` takes hidden states, whole or sequence shards."""

    def __init__(self, head: Head, cut: Cut, axis: Axis, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel, self.vocab_size = axis, sequence_parallel, head.vocab_size
        self.weight = _new_part(head.weight, cut, axis)
        self.bias = None if head.bias is None else _new_part(head.bias, cut, axis)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return column_linear(
            hidden_BTD, self.weight, self._padded_bias(), self.axis,
            sequence_parallel=self.sequence_parallel, gradient_total=self.gradient_total,
        )  # fmt: skip

    def _padded_bias(self) -> Tensor | None:
        """Return Head's bias with -inf for padding; a rank may hold only padding."""
        return padded_bias(self.weight, self.bias, self.vocab_size - self.axis.index * self.weight.shape[0])


@contextmanager
def heads_take_whole_sequences(model: nn.Module) -> Iterator[None]:
    """Make the model's vocabulary heads accept hidden states of the whole sequence, or of any selected positions, while
    the context is open, instead of this rank's shard of the sequence.
    """
    heads = [module for module in model.modules() if isinstance(module, VocabHead) and module.sequence_parallel]
    for head in heads:
        head.sequence_parallel = False
    try:
        yield
    finally:
        for head in heads:
            head.sequence_parallel = True


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, axis: Axis, num_samples: int = 0, z_loss: float = 0.0
) -> Tensor:
    """Return the sum of -log p(label) in fp32 over labels that are not IGNORED, equal on every rank of the axis, which
    splits the vocabulary. `logits` are this rank's columns, `labels` are ids of the whole vocabulary. With a `z_loss`
    factor or `num_samples`, return a vector: that sum, then the z-loss, then each sample's part of the sum.

    Works eagerly (chunks of rows, no fp32 copy of all logits) and compiled (a single fused chunk).
    """
    total: Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), labels.flatten(), num_samples, z_loss, axis
    )
    return total


@torch.no_grad()
def count_hits(logits: Tensor, labels: Tensor, axis: Axis, num_samples: int = 0) -> Tensor:
    """Return an fp32 scalar, equal on every rank of the axis, which splits the vocabulary: the number of labels,
    IGNORED ones excluded, that have the highest logit. `logits` are this rank's columns, `labels` are ids of the whole
    vocabulary. With `num_samples`, return [1 + num_samples]: that number, then the part of each sample.
    """
    logits_NV, labels_N = logits.flatten(0, -2), labels.flatten()
    column_N, mine_N = _local_rows(labels_N, logits_NV.shape[-1], axis)
    label_N = logits_NV.gather(-1, column_N.unsqueeze(-1)).squeeze(-1).masked_fill(~mine_N, float("-inf"))
    best_2N = torch.stack((logits_NV.amax(-1), label_N)).float()
    # collective: the maximum logit of each row, and the label's logit, over tp
    all_reduce(best_2N, axis, dist.ReduceOp.MAX)
    hits_N = (best_2N[0] == best_2N[1]) & (labels_N != IGNORED)
    return with_sample_sums(hits_N.sum().to(torch.float32), hits_N, num_samples)


@torch.no_grad()
def label_scores(compute_logits: Callable[[Tensor], Tensor], hidden_KD: Tensor, labels_K: Tensor, axis: Axis) -> Tensor:
    """Return [2, K] in float64, equal on every rank of the axis: row 0 is -log p of each label, row 1 is 1 if the label
    is the most likely token, else 0. `compute_logits` turns some rows of `hidden_KD` into logits over this rank's
    tokens.

    `compute_logits` is called for a few rows at a time, so that only their logits exist at once. If several tokens have
    the highest logit, the first counts as the most likely. float64 keeps the accuracy of the logits in a sum over a
    corpus.
    """
    chunk_results = [hidden_KD.new_empty(4, 0, dtype=torch.float64)]
    for hidden, labels in zip(*(torch.split(x, HEAD_ROWS) for x in (hidden_KD, labels_K)), strict=True):
        logits_NV = compute_logits(hidden)
        column_N = _local_column(labels, logits_NV.shape[-1], axis)
        small_chunks = zip(*(torch.split(x, EXP_ROWS) for x in (logits_NV, column_N)), strict=True)
        best_N = logits_NV.argmax(-1) + axis.index * logits_NV.shape[-1]
        sums_3N = torch.cat([row_statistics(rows, column, torch.float64) for rows, column in small_chunks], 1)
        chunk_results.append(torch.cat([sums_3N, best_N[None].double()]))
    local_4K = torch.cat(chunk_results, 1)
    # collective: gathers four numbers per label from every tp rank; each rank then combines them
    all_R4K = gather_stack(local_4K, axis) if axis.size > 1 else local_4K[None]
    top_RK, sum_RK, label_RK, best_RK = all_R4K.unbind(1)
    top_K = top_RK.amax(0)
    nll_K = (sum_RK * (top_RK - top_K).exp()).sum(0).log() + (top_K - label_RK.sum(0))
    first_K = (top_RK == top_K).byte().argmax(0)  # because: ranks hold the tokens in order, so the first rank is right
    best_K = best_RK.gather(0, first_K[None])[0]
    return torch.stack([nll_K, (best_K == labels_K).double()])


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, num_samples: int, z_loss: float, axis: Axis) -> Tensor:
        column_N = _local_column(labels_N, logits_NV.shape[-1], axis)
        # collective: gathers three fp32 numbers per row from every tp rank; each rank then combines them
        top_RN, sum_RN, label_RN = gather_stack(row_statistics(logits_NV, column_N), axis).unbind(1)
        top_N = top_RN.amax(0)
        sum_N = (sum_RN * (top_RN - top_N).exp()).sum(0)
        # because: 0 times NaN is NaN, so ignored rows are masked out rather than multiplied by 0
        losses_N = (sum_N.log() + (top_N - label_RN.sum(0))).masked_fill(labels_N == IGNORED, 0.0)
        total, sum_N = with_z_loss(losses_N.sum(), top_N, sum_N, labels_N == IGNORED, z_loss)
        ctx.save_for_backward(logits_NV, labels_N, column_N, top_N, sum_N)
        return with_sample_sums(total, losses_N, num_samples)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of the logits, (softmax * factor - onehot(label)) * grad, for this rank's vocabulary
        columns, and None for the other arguments. The factor is 1 without a z-loss. The gradient is 0 in rows of
        IGNORED labels and needs no communication; `grad` is that of the total.
        """
        logits_NV, labels_N, column_N, top_N, sum_N = ctx.saved_tensors
        weight_N = grads[0].flatten()[0] * (labels_N != IGNORED)
        return logits_gradient(logits_NV, column_N, top_N, sum_N, weight_N), None, None, None, None


def _local_column(labels_N: Tensor, rows_per_rank: int, axis: Axis) -> Tensor:
    """Return each label's column among the vocabulary columns of this rank of the axis, or NO_COLUMN if another rank
    has it. Each rank has `rows_per_rank` tokens.
    """
    row_N, mine_N = _local_rows(labels_N, rows_per_rank, axis)
    return row_N.masked_fill(~mine_N, NO_COLUMN)


def _local_rows(ids: Tensor, rows_per_rank: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return (rows, mask) for token ids, whose embedding rows are split over the axis, `rows_per_rank` on each rank: an
    id's row on this rank, 0 if another rank has it, and True if this rank has it.
    """
    local = ids - axis.index * rows_per_rank
    is_local = (local >= 0) & (local < rows_per_rank)
    return local.masked_fill(~is_local, 0), is_local
