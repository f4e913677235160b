"""Tensor and sequence parallelism: swap the modules that a model's words name for ones that hold this rank's part.

Called by apply on a model without memory, and for the objective's loss; by inference for scores. Knows a model through
`cuts()` alone: names of parameters and paths of modules stay, so that whoever reads a state dict, initial values or
ties sees the same model, smaller.

COLUMN cuts each section by itself (a rank's qkv is [q_t | k_t | v_t], its SwiGLU input [gate_t | up_t]) and ROW the
inputs to match. With `sequence`, everything between a ROW and the next COLUMN is a cut of the sequence: norms, residual
and dropout cost 1/tp, and weights that are not cut get partial gradients, to be summed over tp once a step.

VOCAB cuts embedding rows and head rows, and its cross-entropy never sees whole logits. A rank holds an equal run of
rows; rows after the true vocabulary are padding, score -inf and get no gradient.
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
from lmtrain.kernels.cross_entropy import NOWHERE, gradient, row_sums
from lmtrain.layout import divisors, words
from lmtrain.models.init import apply_ties
from lmtrain.models.layers.heads import Head, OfFirst, added_to_scores
from lmtrain.parallel.collectives import (
    all_reduce,
    column_linear,
    gather_stack,
    row_linear,
    sum_parts,
    taken_from_first,
)
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.products import Summing
from lmtrain.spec import Cut, LanguageModel, Split

HEAD_ROWS = 256  # because: in fp32 those of GPT-2's vocabulary are 50 MB, and the head's product loses nothing
EXP_ROWS = 16  # because: what is made of so many of them stays in a core's own memory


def apply_tensor_parallel(model: LanguageModel, axis: Axis, *, sequence: bool) -> str | None:
    """Split a model over tp ranks in place and return a line for the log; a single rank leaves it as it is."""
    if axis.size == 1:
        return None
    assert isinstance(model, nn.Module)
    shape, cuts, num_cut = model.shape, model.cuts(), 0
    # a head or a column is never cut in two. Settings are refused before; this is for those who come without
    for key, value in (("num_kv_heads", shape.num_kv_heads), ("ffn_width", shape.ffn_width)):
        if value % axis.size != 0:
            legal = [d for d in divisors(shape.num_kv_heads) if shape.ffn_width % d == 0]
            raise LayoutError(f"parallel.tp={axis.size} does not divide model.{key}={value}. Use {words(legal)}.")
    for path, module in list(model.named_modules()):
        cut = cuts.get(f"{path}.weight", Cut(Split.NONE))
        part = _part(module, cut, axis, sequence)
        if part is not None:
            model.set_submodule(path, part)
            num_cut += cut.split is not Split.NONE
    apply_ties(model)
    return f"tensor parallel over {axis.size}: {num_cut} modules{', the sequence too' if sequence else ''}"


def _part(module: nn.Module, cut: Cut, axis: Axis, sequence: bool) -> nn.Module | None:
    match cut.split, module:
        case Split.COLUMN, nn.Linear():
            return ColumnLinear(module, axis, sequence=sequence)
        case Split.ROW, nn.Linear():
            return RowLinear(module, axis, sequence=sequence)
        case Split.VOCAB, nn.Embedding():
            return VocabEmbedding(module, axis, sequence=sequence)
        case Split.VOCAB, Head():
            return VocabHead(module, axis, sequence=sequence)
        case Split.NONE, nn.Embedding() if sequence:
            return SequenceEmbedding(module, axis)
        case Split.NONE, OfFirst() if sequence:
            return TakenFromFirst(axis)
        case Split.NONE, _:
            return None
    raise LayoutError(f"{type(module).__name__} has no {cut.split.value} cut. Use a Linear, an Embedding or a Head.")


class ColumnLinear(Summing):
    """Some of a linear's outputs, of the whole sequence. The model's check has made every section divisible."""

    def __init__(self, whole: nn.Linear, axis: Axis, *, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        rows = whole.out_features // axis.size
        self.weight = nn.Parameter(whole.weight.new_empty(rows, whole.in_features))
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.new_empty(rows))

    def forward(self, x_BTD: Tensor, *, biased: bool = True) -> Tensor:
        bias = self.bias if biased else None
        return column_linear(x_BTD, self.weight, bias, self.axis, sequence=self.sequence, total=self.total)


class RowLinear(Summing):
    """A linear over some of its inputs; ranks' sums add up, and then the bias, which every rank holds, once."""

    def __init__(self, whole: nn.Linear, axis: Axis, *, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        self.weight = nn.Parameter(whole.weight.new_empty(whole.out_features, whole.in_features // axis.size))
        self.bias = whole.bias

    def forward(self, x_BTF: Tensor) -> Tensor:
        return row_linear(x_BTF, self.weight, self.bias, self.axis, sequence=self.sequence, total=self.total)


class SequenceEmbedding(nn.Module):
    """A whole table (positions, segments), read for this rank's cut of the sequence."""

    def __init__(self, whole: nn.Embedding, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = whole.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embedding of this rank's part of the sequence; ids hold the whole sequence in their last dim."""
        length = ids.shape[-1] // self.axis.size
        return nn.functional.embedding(ids.narrow(-1, self.axis.index * length, length), self.weight)


class TakenFromFirst(nn.Module):
    """What was computed from the first token of a cut of the sequence is right on the first rank alone."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return taken_from_first(x, self.axis)


def rows_per_rank(num_rows: int, size: int) -> int:
    """Return the rows of the vocabulary per rank, padded so that every rank has as many."""
    return -(-num_rows // size)


class VocabEmbedding(nn.Module):
    """Each rank looks up the tokens it has, takes 0 for the others, and the sum over ranks is the embedding."""

    def __init__(self, whole: nn.Embedding, axis: Axis, *, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        rows = rows_per_rank(whole.num_embeddings, axis.size)
        self.weight = nn.Parameter(whole.weight.new_empty(rows, whole.embedding_dim))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        row_BT, mine_BT = _find(tokens_BT, self.weight.shape[0], self.axis)
        x_BTD = F.embedding(row_BT, self.weight).masked_fill(~mine_BT.unsqueeze(-1), 0.0)
        return sum_parts(x_BTD, self.axis, sequence=self.sequence)


class VocabHead(Summing):
    """Scores of this rank's tokens. `forward` takes the model's hidden states, cut or not."""

    def __init__(self, whole: Head, axis: Axis, *, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence, self.vocab_size = axis, sequence, whole.vocab_size
        rows = rows_per_rank(whole.out_features, axis.size)
        self.weight = nn.Parameter(whole.weight.new_empty(rows, whole.in_features))
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.new_empty(rows))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return column_linear(
            hidden_BTD, self.weight, self._padding(), self.axis, sequence=self.sequence, total=self.total
        )

    def _padding(self) -> Tensor | None:
        """Return what padding adds to the scores, as Head does; a rank may hold only padding."""
        return added_to_scores(self.weight, self.bias, self.vocab_size - self.axis.index * self.weight.shape[0])


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Inside, a model's logits take hidden states of whole sequences, or chosen rows of them, whatever a rank has."""
    heads = [module for module in model.modules() if isinstance(module, VocabHead) and module.sequence]
    for head in heads:
        head.sequence = False
    try:
        yield
    finally:
        for head in heads:
            head.sequence = True


def cross_entropy_sum(logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    """-log p(label) summed in fp32 over labels that are not IGNORED, the same on every rank of the axis.

    `logits` are this rank's columns, `labels` number the whole vocabulary. Serves eager (chunks of rows, no fp32 copy
    of all logits) and a compiler (one chunk, fused) alike.
    """
    total: Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), labels.flatten(), axis
    )
    return total


@torch.no_grad()
def hit_sum(logits: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    """Return how many labels, IGNORED ones aside, have the highest score of their row on any rank, in fp32."""
    logits_NV, labels_N = logits.flatten(0, -2), labels.flatten()
    column_N, mine_N = _find(labels_N, logits_NV.shape[-1], axis)
    label_N = logits_NV.gather(-1, column_N.unsqueeze(-1)).squeeze(-1).masked_fill(~mine_N, float("-inf"))
    best_2N = torch.stack((logits_NV.amax(-1), label_N)).float()
    # collective: the highest score of each row, and its label's, over tp
    all_reduce(best_2N, axis, dist.ReduceOp.MAX)
    return ((best_2N[0] == best_2N[1]) & (labels_N != IGNORED)).sum().to(torch.float32)


@torch.no_grad()
def label_scores(logits_of: Callable[[Tensor], Tensor], hidden_KD: Tensor, labels_K: Tensor, axis: Axis) -> Tensor:
    """[2, K] in float64, the same on every rank: -log p of each label, and 1 where it is the most likely token, else 0.

    Of several that score alike the first is the most likely. float64, so that a sum over a corpus keeps the logits' own
    accuracy; the logits of a few rows are there at a time.
    """
    here = [hidden_KD.new_empty(4, 0, dtype=torch.float64)]
    for hidden, labels in zip(*(torch.split(x, HEAD_ROWS) for x in (hidden_KD, labels_K)), strict=True):
        logits_NV = logits_of(hidden)
        column_N = _column(labels, logits_NV.shape[-1], axis)
        split = zip(*(torch.split(x, EXP_ROWS) for x in (logits_NV, column_N)), strict=True)
        best_N = logits_NV.argmax(-1) + axis.index * logits_NV.shape[-1]
        exact_3N = torch.cat([row_sums(rows, column, torch.float64) for rows, column in split], 1)
        here.append(torch.cat([exact_3N, best_N[None].double()]))
    here_4K = torch.cat(here, 1)
    # collective: four numbers a label from every tp rank, which each rank then puts together
    parts_R4K = gather_stack(here_4K, axis) if axis.size > 1 else here_4K[None]
    top_RK, sum_RK, label_RK, best_RK = parts_R4K.unbind(1)
    top_K = top_RK.amax(0)
    nll_K = (sum_RK * (top_RK - top_K).exp()).sum(0).log() + (top_K - label_RK.sum(0))
    first_K = (top_RK == top_K).byte().argmax(0)  # because: ranks hold the tokens in order
    best_K = best_RK.gather(0, first_K[None])[0]
    return torch.stack([nll_K, (best_K == labels_K).double()])


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, axis: Axis) -> Tensor:
        column_N = _column(labels_N, logits_NV.shape[-1], axis)
        # collective: three fp32 numbers a row from every tp rank, which each rank then puts together
        top_RN, sum_RN, label_RN = gather_stack(row_sums(logits_NV, column_N), axis).unbind(1)
        top_N = top_RN.amax(0)
        sum_N = (sum_RN * (top_RN - top_N).exp()).sum(0)
        ctx.save_for_backward(logits_NV, labels_N, column_N, top_N, sum_N)
        # because: 0 times a row that has gone to nan would be nan; an ignored row is left out whatever it holds
        return (sum_N.log() + (top_N - label_RN.sum(0))).masked_fill(labels_N == IGNORED, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return softmax - onehot(label) in this rank's columns, and 0 for ignored rows, without communication."""
        logits_NV, labels_N, column_N, top_N, sum_N = ctx.saved_tensors
        weight_N = grads[0] * (labels_N != IGNORED)
        return gradient(logits_NV, column_N, top_N, sum_N, weight_N), None, None


def _column(labels_N: Tensor, num_rows: int, axis: Axis) -> Tensor:
    """Return the column of each label among this rank's, or NOWHERE."""
    row_N, mine_N = _find(labels_N, num_rows, axis)
    return row_N.masked_fill(~mine_N, NOWHERE)


def _find(ids: Tensor, num_rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Row of each id among this rank's (0 where it has none), and whether it has it."""
    local = ids - axis.index * num_rows
    mine = (local >= 0) & (local < num_rows)
    return local.masked_fill(~mine, 0), mine
