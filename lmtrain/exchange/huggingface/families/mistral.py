"""Hugging Face's Mistral, in all of whose layers attention has the same window or none.

Found by ../model_family_base.py.
"""

from __future__ import annotations

from typing import Any

from lmtrain.exchange.huggingface.model_family_base import NOT_READ, Config, Rule
from lmtrain.exchange.huggingface.rotary_config import ROTARY_DEFAULTS, rotary_entries, rotary_settings
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    FULL_LAYER,
    NO_DROPOUT,
    WINDOW_LAYER,
    RotaryDecoder,
    layer_rules,
    size_entries,
)
from lmtrain.models.gpt_settings import GPTSettings


class Mistral(RotaryDecoder):
    """Mistral 7B, with a window or without."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    rank = 30
    defaults = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "sliding_window": 4096, "layer_types": None, "is_causal": True, **ROTARY_DEFAULTS,
    }  # fmt: skip
    # because: transformers' Mistral has no biases, whatever its config.json says
    required = {"hidden_act": "silu", "is_causal": True, "attention_bias": False, "mlp_bias": False}
    inert = {"use_sliding_window": NOT_READ, "max_window_layers": NOT_READ}
    tokenizer_class = "LlamaTokenizer"
    words = {"norm": "rmsnorm", "activation": "silu", "gated": True, "bias": "none"}

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [*self.word_rules(s), *layer_rules(s, may_have_window=True)]

    def config(self, s: GPTSettings) -> Config:
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": "silu", "rms_norm_eps": s.norm_eps,
            **NO_DROPOUT, "sliding_window": s.window if s.layer_kinds[0].window else None,
        } | rotary_entries(s)  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        return self.common_settings(c) | rotary_settings(c, problems) | {
            "norm_eps": c["rms_norm_eps"], "window": _window(c, problems)
        }  # fmt: skip


def _window(c: Config, problems: list[str]) -> Any:
    """Return the sliding window, in tokens, of the Mistral with the config.json `c`; None if it has none. Append a
    message to `problems` if layer_types gives some layers a window and others not, as in a Ministral.
    """
    kinds = c["layer_types"]
    if kinds is None:
        return c["sliding_window"]
    kind = kinds[0] if isinstance(kinds, list) and kinds else None
    if kind not in (WINDOW_LAYER, FULL_LAYER) or kinds.count(kind) < len(kinds):
        problems.append(f"layer_types would have to be the same for all layers, {WINDOW_LAYER} or {FULL_LAYER}")
    return c["sliding_window"] if kind == WINDOW_LAYER else None
