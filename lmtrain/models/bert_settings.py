"""The settings of an encoder: BERT and Megatron's BERTs are values of these keys. Torch-free.

Called by bert.build and by code that sizes or checks a model before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from lmtrain.models.model_settings import Shape, TransformerSettings, block_shapes, linear_shapes, norm_shapes
from lmtrain.spec import ModelShape, Tie

NUM_SEGMENTS = 2


@dataclass(frozen=True, kw_only=True)
class BertSettings(TransformerSettings):
    kind: ClassVar[str] = "bert"

    norm_order: Literal["pre", "post"] = "pre"
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    head_activation: Literal["gelu", "gelu_tanh"] = "gelu"  # activation between the two linears of the masked head
    pair_head: bool = True

    @property
    def terms(self) -> tuple[str, ...]:
        return ("mlm", "pair") if self.pair_head else ("mlm",)

    @cached_property
    def shape(self) -> ModelShape:
        return replace(super().shape, causal=False)

    @property
    def branch_std(self) -> float:
        """The init std of a branch's last linear; not reduced with post-norm, which normalizes every residual sum."""
        return self.init_std if self.norm_order == "post" else super().branch_std

    def weights(self) -> dict[str, Shape]:
        shape, width, vocab, post = self.shape, self.width, self.padded_vocab_size, self.norm_order == "post"
        result: dict[str, Shape] = {
            "embedding.token.weight": (vocab, width),
            "embedding.position.weight": (self.position_rows, width),
            "embedding.segment.weight": (NUM_SEGMENTS, width),
        }
        result |= norm_shapes("embedding.norm", width) if post else {}
        for layer in range(self.num_layers):
            result |= block_shapes(f"blocks.{layer}", shape)
        result |= {} if post else norm_shapes("norm", width)
        result |= linear_shapes("head.dense", width, width) | norm_shapes("head.norm", width)
        result["head.decoder.bias"] = (vocab,)
        if self.pair_head:
            result |= linear_shapes("pair.pooler", width, width) | linear_shapes("pair.scores", 2, width)
        return result

    def ties(self) -> tuple[Tie, ...]:
        return (Tie("embedding.token.weight", "head.decoder.weight"),)
