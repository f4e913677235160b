"""Every choice within a decoder: GPT-2, Megatron's and MegaScale's GPTs and LLaMA are values of these keys.

Torch-free. Called by gpt.build and by whoever sizes or checks a model before torch is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lmtrain.config.base import Problem, problem_if
from lmtrain.errors import SettingsError
from lmtrain.layout import divisors, words
from lmtrain.models.model_settings import ModelSettings
from lmtrain.spec import ModelShape

# because: LLaMA rounds 8/3 of the width up to this, and cuts over 2, 4 or 8 ranks then stay multiples of 32
SWIGLU_MULTIPLE = 256


@dataclass(frozen=True, kw_only=True)
class GPTSettings(ModelSettings):
    kind: ClassVar[str] = "gpt"

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int | None = None  # fewer than heads: grouped-query attention; None: as many
    head_width: int | None = None  # None: width / num_heads
    ffn_width: int | None = None  # None: 4 x width, or 8/3 x width rounded up for swiglu
    vocab_size: int | None = None  # None: the tokenizer's
    vocab_multiple: int = 128
    seq_len: int
    positions: Literal["learned", "rotary"] = "learned"
    rotary_base: float = 10000.0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    parallel_block: bool = False
    window: int | None = None
    init_std: float = 0.02

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head(self) -> int:
        return self.width // self.num_heads if self.head_width is None else self.head_width

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    @property
    def ffn(self) -> int:
        if self.ffn_width is not None:
            return self.ffn_width
        return _round_up(-(-8 * self.width // 3), SWIGLU_MULTIPLE) if self.gated else 4 * self.width

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads,
            head_width=self.head,
            ffn_width=self.ffn,
            gated=self.gated,
            vocab_size=self.vocab_size or 0,
            seq_len=self.seq_len,
            window=self.window,
        )

    @property
    def padded_vocab_size(self) -> int:
        return _round_up(self.vocab_size or 0, self.vocab_multiple)

    @property
    def uses_dropout(self) -> bool:
        return self.dropout > 0

    @property
    def num_parameters(self) -> int:
        shape, bias = self.shape, int(self.bias)
        norm = self.width * (1 + bias if self.norm == "layernorm" else 1)
        biases = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_width + shape.ffn_width * (1 + shape.gated)
        block = shape.block_matrix_params + bias * (biases + 2 * self.width) + norm * (1 if self.parallel_block else 2)
        tokens = shape.vocab_size * self.width * (1 if self.tied else 2)
        positions = self.seq_len * self.width if self.positions == "learned" else 0
        return self.num_layers * block + norm + tokens + positions

    def with_vocab(self, vocab_size: int) -> GPTSettings:
        if self.vocab_size is None:
            return replace(self, vocab_size=vocab_size)
        if self.vocab_size < vocab_size:
            rule = f"is smaller than the tokenizer's {vocab_size} tokens"
            problem = Problem("vocab_size", self.vocab_size, rule, f"Use {vocab_size}, or null for the tokenizer's.")
            raise SettingsError([problem.text("model")])
        return self

    def problems(self) -> Iterator[Problem]:
        yield from self._size_problems()
        yield from self._head_problems()
        for key, default in (("rotary_base", 10000.0), ("norm_eps", 1e-5), ("init_std", 0.02)):
            value = getattr(self, key)
            yield from problem_if(not 0 < value < float("inf"), key, value, "must be above 0", f"Use {default:g}.")
        yield from problem_if(
            not 0 <= self.dropout < 1, "dropout", self.dropout,
            "is no share of activations to drop, which lies in [0, 1)", "Use 0 or 0.1.",
        )

    def _size_problems(self) -> Iterator[Problem]:
        optional = ("num_kv_heads", "head_width", "ffn_width", "vocab_size", "window")
        for key in ("num_layers", "width", "num_heads", "vocab_multiple", "seq_len", *optional):
            value = getattr(self, key)
            way_out = f"Use 1 or more{', or null for the default' if key in optional else ''}."
            yield from problem_if(value is not None and value < 1, key, value, "must be at least 1", way_out)

    def _head_problems(self) -> Iterator[Problem]:
        if min(self.width, self.num_heads, self.kv_heads) < 1:
            return  # reported as sizes; dividing by them says nothing more
        yield from problem_if(
            self.head_width is None and self.width % self.num_heads != 0, "num_heads", self.num_heads,
            f"does not divide width={self.width}", f"Use {_some(divisors(self.width, 256))}, or set head_width.",
        )
        yield from problem_if(
            self.num_heads % self.kv_heads != 0, "num_kv_heads", self.num_kv_heads,
            f"does not divide num_heads={self.num_heads}", f"Use {_some(divisors(self.num_heads))}.",
        )
        yield from problem_if(
            self.positions == "rotary" and self.head % 2 == 1, "head_width", self.head,
            "is odd, and rotary positions turn pairs of numbers", f"Use {self.head + 1}, or positions=learned.",
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _some(values: list[int]) -> str:
    """At most a dozen legal values: a message is no table."""
    return words(values if len(values) <= 12 else values[-12:])
