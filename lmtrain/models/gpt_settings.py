"""The settings of a decoder: GPT-2, Megatron's and MegaScale's GPTs and LLaMA are values of these keys.

Torch-free. Called by gpt.build and by code that sizes or checks a model before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lmtrain.config.settings_base import Problem, problem_if
from lmtrain.layout import divisors
from lmtrain.models.model_settings import (
    Shape,
    TransformerSettings,
    block_shapes,
    format_largest_choices,
    norm_shapes,
    round_up,
)
from lmtrain.spec import ModelShape, Tie

# because: LLaMA rounds 8/3 of the width up to this multiple, so that shards over 2, 4 or 8 ranks are multiples of 32
SWIGLU_MULTIPLE = 256


@dataclass(frozen=True, kw_only=True)
class GPTSettings(TransformerSettings):
    kind: ClassVar[str] = "gpt"
    optional: ClassVar[tuple[str, ...]] = (
        "num_kv_heads", "head_width", "ffn_width", "vocab_size", "num_positions", "window",
    )  # fmt: skip
    positive: ClassVar[tuple[str, ...]] = ("rotary_base", "norm_eps", "init_std")

    num_kv_heads: int | None = None  # fewer than heads: grouped-query attention; None: as many as heads
    head_width: int | None = None  # None: width / num_heads
    ffn_width: int | None = None  # None: 4 x width, or 8/3 x width rounded up for swiglu
    positions: Literal["learned", "rotary"] = "learned"
    rotary_base: float = 10000.0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu_tanh"
    bias: bool = True
    tied: bool = True
    parallel_block: bool = False
    window: int | None = None

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
        if self.gated and self.ffn_width is None:
            return round_up(-(-8 * self.width // 3), SWIGLU_MULTIPLE)
        return super().ffn

    @property
    def shape(self) -> ModelShape:
        return replace(
            super().shape, num_kv_heads=self.kv_heads, head_width=self.head, gated=self.gated, window=self.window
        )

    @property
    def num_parameters(self) -> int:
        shape, bias = self.shape, int(self.bias)
        norm = self.width * (1 + bias if self.norm == "layernorm" else 1)
        biases = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_width + shape.ffn_width * (1 + shape.gated)
        block = shape.block_matrix_params + bias * (biases + 2 * self.width) + norm * (1 if self.parallel_block else 2)
        tokens = shape.vocab_size * self.width * (1 if self.tied else 2)
        positions = self.position_rows * self.width if self.positions == "learned" else 0
        return self.num_layers * block + norm + tokens + positions

    def weights(self) -> dict[str, Shape]:
        shape, width, vocab = self.shape, self.width, self.padded_vocab_size
        norm_bias = self.bias and self.norm == "layernorm"
        result: dict[str, Shape] = {"embedding.token.weight": (vocab, width)}
        if self.positions == "learned":
            result["embedding.position.weight"] = (self.position_rows, width)
        for layer in range(self.num_layers):
            result |= block_shapes(
                f"blocks.{layer}", shape, bias=self.bias, norm_bias=norm_bias, parallel=self.parallel_block
            )
        result |= norm_shapes("norm", width, bias=norm_bias)
        return result if self.tied else result | {"head.weight": (vocab, width)}

    def ties(self) -> tuple[Tie, ...]:
        return (Tie("embedding.token.weight", "head.weight"),) if self.tied else ()

    def unused(self) -> Iterator[Problem]:
        usual = type(self).rotary_base
        yield from self.problem_if(
            self.positions == "learned" and self.rotary_base != usual, "rotary_base",
            "has an effect only with model.positions=rotary, and positions are learned",
            f"Leave it out, which is {usual:g}.",
        )  # fmt: skip
        yield from self.problem_if(
            self.positions == "rotary" and self.num_positions is not None, "num_positions",
            "has an effect only with model.positions=learned, and rotary positions have no table", "Leave it out.",
        )

    def head_problems(self) -> Iterator[Problem]:
        if min(self.width, self.num_heads, self.kv_heads) < 1:
            return  # sizes below 1 are reported elsewhere, and the checks below would divide by them
        yield from self.checked(
            (self.head_width is None and self.width % self.num_heads != 0, "num_heads",
             f"does not divide width={self.width}",
             f"Use {format_largest_choices(divisors(self.width, 256))}, or set head_width."),
            (self.num_heads % self.kv_heads != 0, "num_kv_heads",
             f"does not divide num_heads={self.num_heads}", f"Use {format_largest_choices(divisors(self.num_heads))}."),
        )  # fmt: skip
        yield from problem_if(
            self.positions == "rotary" and self.head % 2 == 1, "head_width", self.head,
            "is odd, and rotary positions turn pairs of numbers", f"Use {self.head + 1}, or positions=learned.",
        )
