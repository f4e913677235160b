"""The words in which a model describes itself; `parallel` applies them and `plan` prices them. No torch.

A model obeys three rules so that it can be cut: its blocks live in a ModuleDict; its first and last modules
may be None and forward then passes through; no layer caches a head count that a shard would falsify.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


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

    def flops_per_token(self, seq_len: int | None = None) -> float:
        """Model FLOPs of forward and backward for one token: 72 L h^2 (1 + s/(6h)) + 6 h V for GPT-2's shape.

        Attention is counted in full, not halved for causality, and recompute is not counted, as in
        Korthikanti 2022 and PaLM's MFU; a sliding window counts its width.
        """
        seq_len = seq_len or self.seq_len
        seen = min(seq_len, self.window) if self.window else seq_len
        attention = 12 * self.num_layers * self.num_heads * self.head_width * seen
        return 6.0 * self.num_layers * self.block_matrix_params + attention + 6.0 * self.width * self.vocab_size


class LanguageModel(Protocol):
    """What every model offers. `forward` gives hidden states; `head` turns chosen ones into logits."""

    shape: ModelShape
    blocks: Any  # nn.ModuleDict[str, block]

    def __call__(self, batch: Any) -> Any: ...
    def logits(self, hidden: Any) -> Any: ...
    def cuts(self) -> Cuts: ...
    def ties(self) -> tuple[Tie, ...]: ...


class Objective(Protocol):
    """What turns a model's output into numbers to minimise: sums, one a term, with their counts known beforehand."""

    terms: tuple[str, ...]

    def loss_sums(self, model: Any, batch: Any) -> Any: ...
    def valid_sums(self, model: Any, batch: Any) -> Any: ...
