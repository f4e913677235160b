"""The description that a model gives of itself, which `parallel` applies and `plan` prices. No torch at run time.

A model obeys three rules so that it can be sharded: its blocks are in a ModuleDict; its first and last modules may be
None, and forward then passes its input through; no layer stores a head count, which sharding would make wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from lmtrain.batch import Batch


class Split(Enum):
    """The way in which a weight may be sharded over tensor-parallel ranks."""

    NONE = "none"  # every rank holds the whole weight
    COLUMN = "column"  # rows of the stored [out, in] matrix: each rank computes a part of the outputs
    ROW = "row"  # columns of the stored matrix: each rank sums over a part of the inputs
    VOCAB = "vocab"  # rows of the vocabulary's tokens: each rank holds a part of the tokens


@dataclass(frozen=True)
class Cut:
    """A weight's split and the sections it consists of: a fused QKV has three sections, a SwiGLU input two."""

    split: Split
    sections: tuple[int, ...] = ()  # sizes along dim 0, in order; empty means a single section
    unit: int = 1  # rows that stay together, such as a head's: with fewer units than ranks, ranks hold copies of one
    partial: bool = False  # a whole weight that each rank uses for its own heads: gradients are summed over tp


Cuts = dict[str, Cut]  # parameter name -> cut; a name that is absent is Split.NONE


@dataclass(frozen=True)
class Tie:
    """Two parameter names that share a tensor, which is saved and counted under `first`."""

    first: str
    second: str


@dataclass(frozen=True)
class Start:
    """Initial distribution of a parameter: normal(mean, std), or the constant `mean` if std is 0."""

    mean: float = 0.0
    std: float = 0.0
    num_rows: int | None = None  # rows from this index on pad the vocabulary and start at 0


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The kind of a layer: its attention reads a window or all tokens, with or without rotary angles."""

    window: bool = False
    rotary: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The integers that determine a model's sizes and FLOPs."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    gated: bool  # SwiGLU: two input matrices
    vocab_size: int  # tokens without the padding of the vocabulary
    seq_len: int
    window: int | None = None  # tokens that sliding-window attention reads; None without a window
    num_window_layers: int = 0  # layers with that window; the others read all tokens
    causal: bool = True

    @property
    def block_matrix_params(self) -> int:
        """The number of weights in a block's matrices, without norms and biases."""
        attention = self.width * self.head_width * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + self.width * self.ffn_width * (3 if self.gated else 2)

    def window_in(self, seq_len: int) -> int:
        """Return how many tokens of a sequence of `seq_len` a layer with a window reads."""
        return min(seq_len, self.window) if self.window else seq_len

    def flops_per_token(self, seq_len: int | None = None, *, scored_share: float = 1.0) -> float:
        """Return the model FLOPs of training on one token, forward and backward. For GPT-2's shape that is 72 L h^2 (1
        + s/(6h)) + 6 h V.

        Attention counts in full, not halved for causality, and recompute is not counted, as in Korthikanti 2022 and
        PaLM's MFU; layers with a sliding window count with its width. Norms (of queries and keys too), activations,
        caps and other operations that are no products are not counted. `scored_share` is the share of tokens for which
        logits are computed.
        """
        seq_len = seq_len or self.seq_len
        num_full_layers = self.num_layers - self.num_window_layers
        attended_tokens = num_full_layers * seq_len + self.num_window_layers * self.window_in(seq_len)
        attention = 12 * self.num_heads * self.head_width * attended_tokens
        head = 6.0 * self.width * self.vocab_size * scored_share
        return 6.0 * self.num_layers * self.block_matrix_params + attention + head


class LanguageModel(Protocol):
    """The interface that `parallel` needs of a model: a torch module, built on the meta device by settings' `build`.

    The model's settings give the rest before torch is imported: the list of weights and the stage of each.
    """

    @property
    def shape(self) -> ModelShape: ...

    @property
    def blocks(self) -> nn.ModuleDict:
        """The blocks by their number in the whole model, whatever the stage.

        Each block is compiled, recomputed and sharded as a unit.
        """

    def __call__(self, batch: Batch, hidden_BTD: Tensor | None = None) -> Tensor:
        """Return hidden states, for the next stage or for `logits`.

        A later stage takes the previous stage's hidden states.

        With sequence parallelism a rank's hidden states are its shard of the sequence; the batch is always whole.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the padded vocabulary, -inf at padding, position by position, for any leading dims.

        The output linear is a `models.layers.heads.Head`, sharded as Split.VOCAB. Over tp it returns the columns of
        this rank's tokens, so no operation that reads across columns may follow it.
        """

    def starts(self) -> dict[str, Start]:
        """Return the initial distribution of each parameter, tied names included."""

    def cuts(self) -> Cuts:
        """Return how each parameter may be sharded over tp; tp is refused unless it divides each section evenly."""

    def ties(self) -> tuple[Tie, ...]:
        """Return the pairs of names that share a tensor."""

    def cut(self, layers: range, *, first: bool, last: bool) -> None:
        """Keep only a stage's modules: these blocks, and the modules before (`first`) and after (`last`) all blocks."""

    # methods that every torch module has:

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def train(self, mode: bool = True) -> Self: ...


class PairModel(LanguageModel, Protocol):
    """A language model whose objective also has the term `pair`."""

    def pair_logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return [B, 2] logits: class 0 if the second segment follows the first, class 1 if not."""
