"""The settings of a decoder that mixes tokens by their running mean, and the list of its weights. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lmtrain.models.model_settings import ModelSettings, checked_vocab_size, round_up
from lmtrain.spec import Cut, Cuts, ModelShape, Split, Tie


@dataclass(frozen=True, kw_only=True)
class MeanMixerSettings(ModelSettings):
    kind: ClassVar[str] = "mean_mixer"

    num_layers: int
    width: int
    num_heads: int
    ffn_width: int
    vocab_size: int | None = None
    vocab_multiple: int = 8
    seq_len: int
    bias: bool = True
    tied: bool = True

    @property
    def terms(self) -> tuple[str, ...]:
        return ("lm",)

    @property
    def uses_dropout(self) -> bool:
        return False

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=self.num_layers, width=self.width, num_heads=self.num_heads, num_kv_heads=self.num_heads,
            head_width=self.width // self.num_heads, ffn_width=self.ffn_width, gated=False,
            vocab_size=self.vocab_size or 0, seq_len=self.seq_len,
        )  # fmt: skip

    @property
    def padded_vocab_size(self) -> int:
        return round_up(self.vocab_size or 0, self.vocab_multiple)

    def weights(self) -> dict[str, tuple[int, ...]]:
        width, ffn, vocab = self.width, self.ffn_width, self.padded_vocab_size
        result: dict[str, tuple[int, ...]] = {"tokens.weight": (vocab, width)}
        for layer in range(self.num_layers):
            sizes = {"mix": (3 * width, width), "out": (width, width), "up": (ffn, width), "down": (width, ffn)}
            result |= {f"blocks.{layer}.{norm}.weight": (width,) for norm in ("mix_norm", "mlp_norm")}
            result |= {f"blocks.{layer}.{name}.weight": size for name, size in sizes.items()}
            result |= {f"blocks.{layer}.{name}.bias": size[:1] for name, size in sizes.items() if self.bias}
        result["last_norm.weight"] = (width,)
        return result if self.tied else result | {"scores.weight": (vocab, width)}

    def layer_of(self, name: str) -> int:
        return -1 if name == "tokens.weight" else super().layer_of(name)

    def ties(self) -> tuple[Tie, ...]:
        return (Tie("tokens.weight", "scores.weight"),) if self.tied else ()

    def cuts(self) -> Cuts:
        return {name: self.cut_of(name) for name in self.weights()}

    def cut_of(self, name: str) -> Cut:
        match name.split(".")[-2:]:
            case ["mix", _]:
                return Cut(Split.COLUMN, (self.width,) * 3)
            case ["up", _]:
                return Cut(Split.COLUMN)
            case ["out" | "down", "weight"]:
                return Cut(Split.ROW)
            case ["tokens" | "scores", "weight"]:
                return Cut(Split.VOCAB)
        return Cut(Split.NONE)

    def with_vocab(self, vocab_size: int) -> MeanMixerSettings:
        return replace(self, vocab_size=checked_vocab_size(self.vocab_size, vocab_size))
