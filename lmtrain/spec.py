"""The words in which a model describes itself; `parallel` applies them and `plan` prices them. No torch.

A model obeys three rules so that it can be cut: its blocks live in a ModuleDict; its first and last modules
may be None and forward then passes through; no layer caches a head count that a shard would falsify.
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
    """How one weight may be cut over tensor-parallel ranks."""

    NONE = "none"  # every rank holds all of it
    COLUMN = "column"  # rows of the stored [out, in] matrix: each rank makes some outputs
    ROW = "row"  # columns of the stored matrix: each rank sums over some inputs
    VOCAB = "vocab"  # rows are tokens


@dataclass(frozen=True)
class Cut:
    """A weight's split, and the sections it is made of: a fused QKV is three, a SwiGLU input is two."""

    split: Split
    sections: tuple[int, ...] = ()  # sizes along dim 0, in order; empty means one section


Cuts = dict[str, Cut]  # parameter name -> cut; a name that is absent is Split.NONE


@dataclass(frozen=True)
class Tie:
    """Two parameter names that are one tensor. Saved and counted under `first`."""

    first: str
    second: str


@dataclass(frozen=True)
class Start:
    """How a parameter starts: normal around `mean`, or constant where `std` is 0."""

    mean: float = 0.0
    std: float = 0.0
    num_rows: int | None = None  # rows after these pad the vocabulary and start at 0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The integers from which sizes and FLOPs follow."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    gated: bool  # SwiGLU: two input matrices
    vocab_size: int  # true tokens; padding is not counted
    seq_len: int
    window: int | None = None  # sliding-window attention sees this many tokens
    causal: bool = True

    @property
    def block_matrix_params(self) -> int:
        """Weights of one block's matrices; norms and biases are left out."""
        attention = self.width * self.head_width * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + self.width * self.ffn_width * (3 if self.gated else 2)

    def flops_per_token(self, seq_len: int | None = None, *, scored: float = 1.0) -> float:
        """Model FLOPs of forward and backward for one token: 72 L h^2 (1 + s/(6h)) + 6 h V for GPT-2's shape.

        Attention is counted in full, not halved for causality, and recompute is not counted, as in
        Korthikanti 2022 and PaLM's MFU; a sliding window counts its width. `scored`: the share of tokens of which
        scores over the vocabulary are made, as data's `scored_share` says.
        """
        seq_len = seq_len or self.seq_len
        seen = min(seq_len, self.window) if self.window else seq_len
        attention = 12 * self.num_layers * self.num_heads * self.head_width * seen
        head = 6.0 * self.width * self.vocab_size * scored
        return 6.0 * self.num_layers * self.block_matrix_params + attention + head


class LanguageModel(Protocol):
    """All that `parallel` asks of a model. It is a torch module, made on the meta device by its settings' `build`.

    Its settings say the rest before torch is there: the list of its weights, and which stage each belongs to.
    """

    @property
    def shape(self) -> ModelShape: ...

    @property
    def blocks(self) -> nn.ModuleDict:
        """The blocks by their number in the whole model; each is compiled, recomputed and sharded as one."""

    def __call__(self, batch: Batch, hidden_BTD: Tensor | None = None) -> Tensor:
        """Hidden states, for the next stage or for `logits`. A stage after the first is given those of the one before.

        With sequence parallelism the hidden states of a rank are its cut of the sequence; the batch is always whole.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the padded vocabulary, -inf for padding; each position by itself, so any leading dims will do.

        The linear that makes them is a `models.layers.heads.Head`, cut as Split.VOCAB. Over tp it makes the columns of
        this rank's tokens: nothing may follow it that looks at several columns.
        """

    def starts(self) -> dict[str, Start]:
        """Return the initial distribution of each parameter, tied names included."""

    def cuts(self) -> Cuts:
        """Return how each parameter may be split over tp; its sections divide evenly, or tp is refused."""

    def ties(self) -> tuple[Tie, ...]:
        """Pairs of names that are one tensor."""

    def cut(self, layers: range, *, first: bool, last: bool) -> None:
        """Keep what one pipeline stage holds: these blocks, what stands before the first, what follows the last."""

    # and of what every torch module has:

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def train(self, mode: bool = True) -> Self: ...


class PairModel(LanguageModel, Protocol):
    """What a model with the term `pair` offers besides."""

    def pair_logits(self, hidden_BTD: Tensor) -> Tensor:
        """[B, 2]: whether the second segment follows the first (0) or not (1)."""
