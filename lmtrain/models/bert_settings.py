"""Every choice within an encoder: BERT and Megatron's BERTs are values of these keys. Torch-free.

Called by bert.build and by whoever sizes or checks a model before torch is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lmtrain.config.base import Problem, problem_if
from lmtrain.layout import divisors
from lmtrain.models import gpt_settings
from lmtrain.models.model_settings import ModelSettings, checked_vocab_size, round_up, some
from lmtrain.spec import Cut, Cuts, ModelShape, Split, Tie

NUM_SEGMENTS = 2


@dataclass(frozen=True, kw_only=True)
class BertSettings(ModelSettings):
    kind: ClassVar[str] = "bert"

    num_layers: int
    width: int
    num_heads: int
    ffn_width: int | None = None  # None: 4 x width
    vocab_size: int | None = None  # None: the tokenizer's
    vocab_multiple: int = 128
    seq_len: int
    norm_order: Literal["pre", "post"] = "pre"
    norm_eps: float = 1e-5
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    head_activation: Literal["gelu", "gelu_tanh"] = "gelu"  # between the two linears of the masked head
    dropout: float = 0.0
    pair_head: bool = True
    init_std: float = 0.02

    @property
    def terms(self) -> tuple[str, ...]:
        return ("mlm", "pair") if self.pair_head else ("mlm",)

    @property
    def ffn(self) -> int:
        return 4 * self.width if self.ffn_width is None else self.ffn_width

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_width=self.width // self.num_heads,
            ffn_width=self.ffn,
            gated=False,
            vocab_size=self.vocab_size or 0,
            seq_len=self.seq_len,
            causal=False,
        )

    @property
    def padded_vocab_size(self) -> int:
        return round_up(self.vocab_size or 0, self.vocab_multiple)

    @property
    def uses_dropout(self) -> bool:
        return self.dropout > 0

    @property
    def num_parameters(self) -> int:
        width, vocab = self.width, self.vocab_size or 0
        block = self.shape.block_matrix_params + self.ffn + 9 * width  # biases of four linears, two norms
        embedding = (vocab + self.seq_len + NUM_SEGMENTS) * width
        head = width * width + 3 * width + vocab
        pair = width * width + 3 * width + 2 if self.pair_head else 0
        return self.num_layers * block + embedding + 2 * width + head + pair

    def weights(self) -> dict[str, tuple[int, ...]]:
        width, vocab, post = self.width, self.padded_vocab_size, self.norm_order == "post"
        result: dict[str, tuple[int, ...]] = {
            "embedding.token.weight": (vocab, width),
            "embedding.position.weight": (self.seq_len, width),
            "embedding.segment.weight": (NUM_SEGMENTS, width),
        }
        result |= _norm("embedding.norm", width) if post else {}
        for layer in range(self.num_layers):
            block = f"blocks.{layer}."
            result |= _norm(f"{block}attention_norm", width)
            result |= _linear(f"{block}attention.qkv", 3 * width, width)
            result |= _linear(f"{block}attention.out", width, width)
            result |= _norm(f"{block}mlp_norm", width)
            result |= _linear(f"{block}mlp.up", self.ffn, width)
            result |= _linear(f"{block}mlp.down", width, self.ffn)
        result |= {} if post else _norm("norm", width)
        result |= _linear("head.dense", width, width) | _norm("head.norm", width) | {"head.decoder.bias": (vocab,)}
        if self.pair_head:
            result |= _linear("pair.pooler", width, width) | _linear("pair.scores", 2, width)
        return result

    def ties(self) -> tuple[Tie, ...]:
        return (Tie("embedding.token.weight", "head.decoder.weight"),)

    def cuts(self) -> Cuts:
        return {name: cut_of(name, self.shape) for name in self.weights()}

    def with_vocab(self, vocab_size: int) -> BertSettings:
        return replace(self, vocab_size=checked_vocab_size(self.vocab_size, vocab_size))

    def problems(self) -> Iterator[Problem]:
        optional = ("ffn_width", "vocab_size")
        for key in ("num_layers", "width", "num_heads", "vocab_multiple", "seq_len", *optional):
            value = getattr(self, key)
            way_out = f"Use 1 or more{', or null for the default' if key in optional else ''}."
            yield from problem_if(value is not None and value < 1, key, value, "must be at least 1", way_out)
        if min(self.width, self.num_heads) >= 1:
            yield from problem_if(
                self.width % self.num_heads != 0, "num_heads", self.num_heads,
                f"does not divide width={self.width}", f"Use {some(divisors(self.width, 256))}.",
            )  # fmt: skip
        for key, default in (("norm_eps", 1e-5), ("init_std", 0.02)):
            value = getattr(self, key)
            yield from problem_if(not 0 < value < float("inf"), key, value, "must be above 0", f"Use {default:g}.")
        yield from problem_if(
            not 0 <= self.dropout < 1, "dropout", self.dropout,
            "is not a share of activations to drop, which lies in [0, 1)", "Use 0 or 0.1.",
        )  # fmt: skip


def cut_of(name: str, shape: ModelShape) -> Cut:
    """Blocks as GPT's. The decoder is the embedding's rows and has a bias for each; the other heads are left whole."""
    if name.startswith("head.decoder."):
        return Cut(Split.VOCAB)
    return gpt_settings.cut_of(name, shape)


def _norm(path: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{path}.weight": (width,), f"{path}.bias": (width,)}


def _linear(path: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{path}.weight": (outputs, inputs), f"{path}.bias": (outputs,)}
