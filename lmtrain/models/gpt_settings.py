"""Every choice within a decoder: GPT-2, Megatron's and MegaScale's GPTs and LLaMA are values of these keys.

Torch-free. Called by gpt.build and by whoever sizes or checks a model before torch is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lmtrain.config.base import Problem, problem_if
from lmtrain.layout import divisors
from lmtrain.models.model_settings import ModelSettings, checked_vocab_size, round_up, some
from lmtrain.spec import Cut, Cuts, ModelShape, Split, Tie

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
    def terms(self) -> tuple[str, ...]:
        return ("lm",)

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
        return round_up(-(-8 * self.width // 3), SWIGLU_MULTIPLE) if self.gated else 4 * self.width

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
        return round_up(self.vocab_size or 0, self.vocab_multiple)

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

    def weights(self) -> dict[str, tuple[int, ...]]:
        shape, width, vocab = self.shape, self.width, self.padded_vocab_size
        heads, keys = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
        result: dict[str, tuple[int, ...]] = {"embedding.token.weight": (vocab, width)}
        if self.positions == "learned":
            result["embedding.position.weight"] = (self.seq_len, width)
        for layer in range(self.num_layers):
            block = f"blocks.{layer}."
            result |= self._norm(f"{block}attention_norm")
            result |= self._linear(f"{block}attention.qkv", heads + 2 * keys, width)
            result |= self._linear(f"{block}attention.out", width, heads)
            result |= {} if self.parallel_block else self._norm(f"{block}mlp_norm")
            result |= self._linear(f"{block}mlp.up", self.ffn * (2 if self.gated else 1), width)
            result |= self._linear(f"{block}mlp.down", width, self.ffn)
        result |= self._norm("norm")
        return result if self.tied else result | {"head.weight": (vocab, width)}

    def ties(self) -> tuple[Tie, ...]:
        return (Tie("embedding.token.weight", "head.weight"),) if self.tied else ()

    def cuts(self) -> Cuts:
        return {name: cut_of(name, self.shape) for name in self.weights()}

    def _norm(self, path: str) -> dict[str, tuple[int, ...]]:
        both = self.bias and self.norm == "layernorm"
        return {f"{path}.{name}": (self.width,) for name in (("weight", "bias") if both else ("weight",))}

    def _linear(self, path: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        weight: dict[str, tuple[int, ...]] = {f"{path}.weight": (outputs, inputs)}
        return weight | {f"{path}.bias": (outputs,)} if self.bias else weight

    def with_vocab(self, vocab_size: int) -> GPTSettings:
        return replace(self, vocab_size=checked_vocab_size(self.vocab_size, vocab_size))

    def problems(self) -> Iterator[Problem]:
        yield from self._size_problems()
        yield from self._head_problems()
        for key, default in (("rotary_base", 10000.0), ("norm_eps", 1e-5), ("init_std", 0.02)):
            value = getattr(self, key)
            yield from problem_if(not 0 < value < float("inf"), key, value, "must be above 0", f"Use {default:g}.")
        yield from problem_if(
            not 0 <= self.dropout < 1, "dropout", self.dropout,
            "is not a share of activations to drop, which lies in [0, 1)", "Use 0 or 0.1.",
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
            f"does not divide width={self.width}", f"Use {some(divisors(self.width, 256))}, or set head_width.",
        )
        yield from problem_if(
            self.num_heads % self.kv_heads != 0, "num_kv_heads", self.num_kv_heads,
            f"does not divide num_heads={self.num_heads}", f"Use {some(divisors(self.num_heads))}.",
        )
        yield from problem_if(
            self.positions == "rotary" and self.head % 2 == 1, "head_width", self.head,
            "is odd, and rotary positions turn pairs of numbers", f"Use {self.head + 1}, or positions=learned.",
        )


def cut_of(name: str, shape: ModelShape) -> Cut:
    """How Megatron-LM cuts a layer: first linears by output, second ones by input, the vocabulary by rows."""
    match name.split(".")[-2:]:
        case ["qkv", _]:
            kv = shape.num_kv_heads * shape.head_width
            return Cut(Split.COLUMN, (shape.num_heads * shape.head_width, kv, kv))
        case ["up", _]:
            return Cut(Split.COLUMN, (shape.ffn_width,) * (2 if shape.gated else 1))
        case ["out" | "down", "weight"]:
            return Cut(Split.ROW)
        case ["token" | "head", "weight"]:
            return Cut(Split.VOCAB)
    return Cut(Split.NONE)
