"""The settings of a decoder: GPT-2, LLaMA, Qwen, OLMo, Gemma and others are values of these keys.

Torch-free. Called by gpt.build and by code that sizes or checks a model before torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from lmtrain.config.settings_base import Problem, setting, show
from lmtrain.errors import leave_out, own, way
from lmtrain.layout import divisors
from lmtrain.models.model_settings import (
    Shape,
    TransformerSettings,
    block_shapes,
    format_largest_choices,
    norm_shapes,
    round_up,
)
from lmtrain.models.rotary_settings import RotarySettings
from lmtrain.spec import Cut, LayerKind, ModelShape, Split, Tie

# because: LLaMA rounds 8/3 of the width up to this multiple, so that shards over 2, 4 or 8 ranks are multiples of 32
GATED_MULTIPLE = 256
# The layers that the letters of a pattern stand for.
LAYER_LETTERS = {
    "w": LayerKind(window=True, rotary=True), "f": LayerKind(window=False, rotary=True),
    "W": LayerKind(window=True, rotary=False), "F": LayerKind(window=False, rotary=False),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GPTSettings(RotarySettings, TransformerSettings):
    kind: ClassVar[str] = "gpt"
    optional: ClassVar[tuple[str, ...]] = (
        "num_kv_heads", "head_width", "ffn_width", "vocab_size", "num_positions", "window", *RotarySettings.optional,
    )  # fmt: skip
    positive: ClassVar[tuple[str, ...]] = (
        "norm_eps", "init_std", "embedding_scale", "residual_scale", "logit_scale", *RotarySettings.positive
    )  # fmt: skip

    num_kv_heads: int | None = None  # fewer than heads: grouped-query attention; None: as many as heads
    head_width: int | None = None  # None: width / num_heads
    ffn_width: int | None = None  # None: 4 x width, or 8/3 x width rounded up if gated
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_order: Literal["pre", "branch", "sandwich", "post"] = "pre"  # of a branch's input, output, both, or the sum
    norm_weight: Literal["ones", "from_zero", "none"] = "ones"  # a norm multiplies by a weight, 1 + a weight or nothing
    norm_bias: bool | None = None  # whether layer norms add a vector; None: if bias=all
    qk_norm: Literal["none", "head", "whole"] = "none"  # norms of queries and keys: over each head or over all
    activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu2"] = "gelu_tanh"
    gated: bool = False
    bias: Literal["all", "none", "qkv", "mlp"] = "all"
    head_bias: bool = False  # whether the head adds a vector to the logits
    tied: bool = True
    parallel_block: Literal["no", "one_norm", "two_norms"] = "no"
    window: int | None = None
    layer_pattern: str | None = None  # letters of LAYER_LETTERS, repeated over the layers
    embedding_scale: float = 1.0  # factor of the tokens' embeddings
    attention_scale: float | None = None  # factor of attention scores; None: 1 / sqrt(head_width)
    residual_scale: float = 1.0  # factor of what attention and MLP add to the hidden state
    logit_scale: float = 1.0  # factor of the logits
    attention_cap: float | None = None  # attention scores s become cap x tanh(s / cap); None: no cap
    logit_cap: float | None = None  # logits z become cap x tanh(z / cap), after logit_scale; None: no cap
    # factor of the mean of logsumexp(logits)^2, which is added to the loss that training minimizes
    z_loss: float = setting(default=0.0, affects="training")

    @classmethod
    def from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return `data`, model settings that an older version of lmtrain wrote, with values that have been renamed
        since replaced by today's, such as bias=true by bias="all".
        """
        words = {("bias", True): "all", ("bias", False): "none"}
        words |= {("parallel_block", True): "one_norm", ("parallel_block", False): "no"}
        result = {
            key: words.get((key, value), value) if isinstance(value, bool) else value for key, value in data.items()
        }
        return result | {"activation": "silu", "gated": True} if result.get("activation") == "swiglu" else result

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
    def ffn(self) -> int:
        if self.gated and self.ffn_width is None:
            return round_up(-(-8 * self.width // 3), GATED_MULTIPLE)
        return super().ffn

    @property
    def has_norm_bias(self) -> bool:
        """True if layer norms add a bias."""
        return self.norm == "layernorm" and (self.bias == "all" if self.norm_bias is None else self.norm_bias)

    @property
    def norm_start(self) -> float:
        return 0.0 if self.norm_weight == "from_zero" else 1.0

    @property
    def caps_scores(self) -> bool:
        return self.attention_cap is not None

    @property
    def norm_parts(self) -> tuple[str, ...]:
        """The parameters of a norm: weight and bias, one of them, or none."""
        has_weight = self.norm_weight != "none"
        return (("weight",) if has_weight else ()) + (("bias",) if has_weight and self.has_norm_bias else ())

    @property
    def block_norms(self) -> tuple[str, ...]:
        """The names of the modules in a block that normalize hidden states: before attention and MLP, after them, or
        both.
        """
        before = ("attention_norm", *(() if self.parallel_block == "one_norm" else ("mlp_norm",)))
        after = ("attention_out_norm", "mlp_out_norm")
        return {"branch": after, "sandwich": (*before, *after)}.get(self.norm_order, before)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer: whether its attention reads a sliding window or all tokens, and whether it has rotary
        angles.
        """
        if self.layer_pattern is None:
            return (LayerKind(window=self.window is not None, rotary=self.positions == "rotary"),) * self.num_layers
        return tuple(LAYER_LETTERS[self.layer_pattern[i % len(self.layer_pattern)]] for i in range(self.num_layers))

    @cached_property
    def shape(self) -> ModelShape:
        return replace(
            super().shape, num_kv_heads=self.kv_heads, head_width=self.head, gated=self.gated,
            window=self.window, num_window_layers=sum(kind.window for kind in self.layer_kinds),
        )  # fmt: skip

    def _qk_norm_widths(self) -> tuple[int, ...]:
        """Return (weights of the norm of queries, weights of the norm of keys) as numbers; () if there are no such
        norms or they have no weights.
        """
        if self.qk_norm == "none" or self.norm_weight == "none":
            return ()
        return (self.head,) * 2 if self.qk_norm == "head" else (self.num_heads * self.head, self.kv_heads * self.head)

    def weights(self) -> dict[str, Shape]:
        shape, width, vocab = self.shape, self.width, self.padded_vocab_size
        result: dict[str, Shape] = {"embedding.token.weight": (vocab, width)}
        if self.positions == "learned":
            result["embedding.position.weight"] = (self.position_rows, width)
        for layer in range(self.num_layers):
            result |= block_shapes(
                f"blocks.{layer}", shape, norms=dict.fromkeys(self.block_norms, self.norm_parts),
                qkv_bias=self.bias in ("all", "qkv"), out_bias=self.bias == "all",
                mlp_bias=self.bias in ("all", "mlp"), qk_norms=self._qk_norm_widths(),
            )  # fmt: skip
        if self.norm_order != "post":
            result |= norm_shapes("norm", width, self.norm_parts)
        result |= {} if self.tied else {"head.weight": (vocab, width)}
        return result | ({"head.bias": (vocab,)} if self.head_bias else {})

    def cut_of(self, name: str) -> Cut:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return Cut(Split.COLUMN, unit=self.head) if self.qk_norm == "whole" else Cut(Split.NONE, partial=True)
        return super().cut_of(name)

    def ties(self) -> tuple[Tie, ...]:
        return (Tie("embedding.token.weight", "head.weight"),) if self.tied else ()

    def unused(self) -> Iterator[Problem]:
        yield from self.unused_rotary()
        yield from self.problem_if(
            self.positions == "rotary" and self.num_positions is not None, "num_positions",
            "has an effect only with model.positions=learned, and rotary positions have no table",
            f"{leave_out()}, which is {own('null')}.",
        )
        letters = self.layer_pattern or ""
        yield from self.problem_if(
            self.window is not None and letters != "" and "w" not in letters.lower(), "window",
            f"has an effect only in layers w or W, and layer_pattern={letters} has none",
            f"{leave_out()}, which is {own('null')}, or add such layers.",
        )  # fmt: skip
        yield from self.problem_if(
            self.layer_pattern is not None and self.layer_kinds == replace(self, layer_pattern=None).layer_kinds,
            "layer_pattern", "makes all layers as they are without it", f"{leave_out()}, which is {own('null')}.",
        )  # fmt: skip
        yield from self.problem_if(
            self.norm_bias is False and (self.norm == "rmsnorm" or self.norm_weight == "none"), "norm_bias",
            "has an effect only on layer norms with a weight, and there are none",
            f"{leave_out()}, which is {own('null')}.",
        )  # fmt: skip

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        # because: another number is reported above, and the default head width is the width divided by it
        if self.num_heads >= 1 and not self._is_uneven:
            yield from self.rotary_problems(self.head)
        yield from self.checked(
            (self.parallel_block != "no" and self.norm_order != "pre", "parallel_block",
             f"needs norms before the branches, and norm_order={self.norm_order}", f"Use {way('.norm_order=pre')}."),
            (bool(self.norm_bias) and self.norm == "rmsnorm", "norm_bias",
             "needs norm=layernorm, and an RMSNorm has no bias", f"{leave_out()}, which is {own('null')}."),
            (bool(self.norm_bias) and self.norm_weight == "none", "norm_bias",
             "needs a norm with a weight, and norm_weight=none", f"{leave_out()}, which is {own('null')}."),
        )  # fmt: skip
        yield from self._pattern_problems()
        yield from self.checked(
            *(self.above_0(key, f"Use {own('null')} for none." if getattr(self, key) == 0 else "Give a number above 0.")
              for key in ("attention_scale", "attention_cap", "logit_cap")),
            (self.z_loss < 0, "z_loss", "must be at least 0", f"Use {own(0)} or {own('1e-4')}."),
        )  # fmt: skip

    def _pattern_problems(self) -> Iterator[Problem]:
        """Yield a problem for each rule that `layer_pattern` breaks, by itself or together with num_layers, window and
        positions; none if it is not set.
        """
        pattern = self.layer_pattern
        if pattern is None:
            return
        unknown = sorted(set(pattern) - set(LAYER_LETTERS))
        yield from self.checked(
            (not pattern or bool(unknown), "layer_pattern", "is not a row of the letters w, f, W and F",
             "Give w for a window, f for all tokens, a capital letter for a layer without rotary angles." if pattern
             else f"Use {own('null')} for layers of one kind."),
            (len(pattern) > self.num_layers, "layer_pattern", f"has more letters than num_layers={self.num_layers}",
             f"Use {self._shorter_pattern(pattern)}."),
            ("w" in pattern.lower() and self.window is None, "layer_pattern",
             "has layers with a window, and window=null",
             "Give the tokens that such a layer reads, as in model.window=N."),
            (bool(set(pattern) & set("wf")) and self.positions == "learned", "layer_pattern",
             "has layers with rotary angles, and positions=learned",
             f"Use {own(pattern.upper())}, or {way('.positions=rotary')}."),
        )  # fmt: skip

    def _shorter_pattern(self, pattern: str) -> str:
        """Return in words how a layer pattern with more letters than layers fits: by each of its letters once, if there
        are layers enough, or by more layers.
        """
        short: str | None = "".join(dict.fromkeys(pattern))
        usual = LayerKind(window=self.window is not None, rotary=self.positions == "rotary")
        if LAYER_LETTERS.get(short or "") == usual:
            short = None  # because: such layers are those of a model without a pattern
        has_room = len(short or "") <= self.num_layers
        return f"{f'{own(show(short))}, or ' * has_room}{way(f'.num_layers={len(pattern)}')}"

    def way_out_of_size(self, key: str) -> str:
        is_needed = key in self.keys_of_scaling or (key == "window" and "w" in (self.layer_pattern or "").lower())
        return "Give 1 or more." if is_needed else super().way_out_of_size(key)

    def head_problems(self) -> Iterator[Problem]:
        if min(self.width, self.num_heads, self.kv_heads) < 1:
            return  # sizes below 1 are reported elsewhere, and the checks below would divide by them
        yield from self.checked(
            (self._is_uneven, "num_heads", f"does not divide width={self.width}", self._way_out_of_heads()),
            (not self._is_uneven and self.num_heads % self.kv_heads != 0, "num_kv_heads",
             f"does not divide num_heads={self.num_heads}", f"Use {format_largest_choices(divisors(self.num_heads))}."),
        )  # fmt: skip

    @property
    def _is_uneven(self) -> bool:
        """True if heads cannot have the default width, which is their share of the model's."""
        return self.head_width is None and self.width % self.num_heads != 0

    def _way_out_of_heads(self) -> str:
        """Return the advice on num_heads: numbers that divide the width, fit num_kv_heads and leave pairs to turn."""
        fitting = [
            heads for heads in divisors(self.width, 256) if heads % (self.num_kv_heads or 1) == 0
            and (self.positions == "learned" or self.rotary_width(self.width // heads) % 2 == 0)
        ]  # fmt: skip
        return f"Use {format_largest_choices(fitting)}, or set head_width." if fitting else "Give another width."
