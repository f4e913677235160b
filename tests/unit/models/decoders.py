"""Small decoders with every word of GPTSettings: each word alone, and random combinations of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from lmtrain.errors import SettingsError
from lmtrain.models.gpt_settings import GPTSettings

# because: all sizes differ, so that none can stand for another
SIZES: dict[str, Any] = {
    "num_layers": 5, "width": 36, "num_heads": 6, "head_width": 8, "ffn_width": 52, "vocab_size": 67,
    "vocab_multiple": 1, "seq_len": 24,
}  # fmt: skip
# each word's values but for its default, with what they need beside them
WORDS: dict[str, tuple[Mapping[str, Any], ...]] = {
    "num_kv_heads": ({"num_kv_heads": 2},),
    "positions": ({"positions": "rotary"},),
    "norm": ({"norm": "rmsnorm"},),
    "norm_order": tuple({"norm_order": order} for order in ("branch", "sandwich", "post")),
    "norm_weight": ({"norm_weight": "from_zero"}, {"norm_weight": "none"}),
    "norm_bias": ({"norm_bias": False}, {"norm_bias": True, "bias": "none"}),
    "qk_norm": ({"qk_norm": "head"}, {"qk_norm": "whole"}),
    "activation": tuple({"activation": kind} for kind in ("gelu", "silu", "relu", "relu2")),
    "gated": ({"gated": True},),
    "bias": tuple({"bias": kind} for kind in ("none", "qkv", "mlp")),
    "head_bias": ({"head_bias": True},),
    "tied": ({"tied": False},),
    "parallel_block": ({"parallel_block": "one_norm"}, {"parallel_block": "two_norms"}),
    "window": ({"window": 7},),
    "layer_pattern": (
        {"layer_pattern": "wF", "window": 7, "positions": "rotary"}, {"layer_pattern": "WF", "window": 7},
    ),
    "rotary_share": ({"rotary_share": 0.5, "positions": "rotary"},),
    "embedding_scale": ({"embedding_scale": 6.0},),
    "attention_scale": ({"attention_scale": 0.2},),
    "residual_scale": ({"residual_scale": 0.5},),
    "logit_scale": ({"logit_scale": 0.5},),
    "attention_cap": ({"attention_cap": 2.0},),
    "logit_cap": ({"logit_cap": 3.0},),
}  # fmt: skip


def each_word() -> list[tuple[str, GPTSettings]]:
    """Return a decoder for each value of each word, named by what differs from the plain one."""
    choices = [choice for values in WORDS.values() for choice in values]
    return [(_name(choice), GPTSettings(**(SIZES | dict(choice)))) for choice in [{}, *choices]]


def random_decoders(count: int, seed: int = 0) -> list[tuple[str, GPTSettings]]:
    """Return `count` decoders with random words, each with about half of them, named by what differs."""
    rng = random.Random(seed)
    return [next(_legal(rng)) for _ in range(count)]


def _legal(rng: random.Random) -> Iterator[tuple[str, GPTSettings]]:
    while True:
        changes: dict[str, Any] = {}
        for values in rng.sample(list(WORDS.values()), rng.randint(2, len(WORDS))):
            changes |= rng.choice(values)
        try:
            yield _name(changes), GPTSettings(**(SIZES | changes))
        except SettingsError:
            continue


def _name(changes: Mapping[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in changes.items()) or "plain"
