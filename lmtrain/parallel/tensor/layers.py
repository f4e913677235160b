"""Tensor and sequence parallelism: swap the modules that a model's words name for ones that hold this rank's part.

Called by apply on a model without memory. Knows a model through `cuts()` alone: names of parameters and paths of
modules stay, so that whoever reads a state dict, initial values or ties sees the same model, smaller.

COLUMN cuts each section by itself (a rank's qkv is [q_t | k_t | v_t], its SwiGLU input [gate_t | up_t]) and ROW the
inputs to match. With `sequence`, everything between a ROW and the next COLUMN is a cut of the sequence: norms, residual
and dropout cost 1/tp, and weights that are not cut get partial gradients, to be summed over tp once a step.
"""

from __future__ import annotations

from torch import Tensor, nn

from lmtrain.errors import LayoutError
from lmtrain.layout import divisors, words
from lmtrain.models.init import apply_ties
from lmtrain.models.layers.heads import Head, OfFirst
from lmtrain.parallel.collectives import column_linear, row_linear, taken_from_first
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.products import Summing
from lmtrain.parallel.tensor.vocabulary import VocabEmbedding, VocabHead
from lmtrain.spec import Cut, LanguageModel, ModelShape, Split


def apply_tensor_parallel(model: LanguageModel, axis: Axis, *, sequence: bool) -> str | None:
    """In place; returns what was done, for the log. A model that is not cut (one rank) is left as it is."""
    if axis.size == 1:
        return None
    assert isinstance(model, nn.Module)
    _check(model.shape, axis.size)
    cuts, num_cut = model.cuts(), 0
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
        """ids are of the whole sequence, in their last dim."""
        length = ids.shape[-1] // self.axis.size
        return nn.functional.embedding(ids.narrow(-1, self.axis.index * length, length), self.weight)


class TakenFromFirst(nn.Module):
    """What was computed from the first token of a cut of the sequence is right on the first rank alone."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return taken_from_first(x, self.axis)


def _check(shape: ModelShape, size: int) -> None:
    """A head or a column is never cut in two. Settings are refused before; this is for those who come without."""
    for key, value in (("num_kv_heads", shape.num_kv_heads), ("ffn_width", shape.ffn_width)):
        if value % size != 0:
            legal = [d for d in divisors(shape.num_kv_heads) if shape.ffn_width % d == 0]
            raise LayoutError(f"parallel.tp={size} does not divide model.{key}={value}. Use {words(legal)}.")
