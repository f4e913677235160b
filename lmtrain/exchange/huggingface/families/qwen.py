"""Hugging Face's Qwen 2 and 2.5, with biases of queries, keys and values, and dense Qwen 3, with norms of each head's
queries and keys. Found by ../model_family_base.py.
"""

from __future__ import annotations

from lmtrain.exchange.huggingface.model_family_base import Config, Rule
from lmtrain.exchange.huggingface.rotary_config import ROTARY_DEFAULTS, rotary_entries, rotary_settings
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    ACTIVATION_NAMES,
    NO_DROPOUT,
    RotaryDecoder,
    activation_setting,
    late_window_entries,
    late_window_settings,
    llama_like_names,
    rotary_layer_rules,
    size_entries,
)
from lmtrain.models.gpt_settings import GPTSettings


class _AnyQwen(RotaryDecoder):
    """The common part of Qwen 2 and 3: activations, and windows in later layers."""

    tokenizer_class = "Qwen2Tokenizer"
    free = ("activation",)

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [*self.word_rules(s), *rotary_layer_rules(s)]

    def settings(self, c: Config, problems: list[str]) -> Config:
        return self.common_settings(c) | rotary_settings(c, problems) | late_window_settings(c, problems) | {
            "norm_eps": c["rms_norm_eps"], "activation": activation_setting(c, "hidden_act", problems)
        }  # fmt: skip


class Qwen2(_AnyQwen):
    """Qwen 2 and 2.5, with biases of queries, keys and values, and windows in later layers or none."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    rank = 40
    defaults = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "tie_word_embeddings": False, "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "layer_types": None, "use_mrope": False, "is_causal": True, **ROTARY_DEFAULTS,
    }  # fmt: skip
    required = {"use_mrope": False, "is_causal": True}
    inert = {"attention_bias": "transformers' Qwen 2 has biases of queries, keys and values whatever it says"}
    words = {"norm": "rmsnorm", "gated": True, "bias": "qkv"}
    has_own_tokenizer = True

    def config(self, s: GPTSettings) -> Config:
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": ACTIVATION_NAMES[s.activation],
            "rms_norm_eps": s.norm_eps, **NO_DROPOUT,
        } | late_window_entries(s) | rotary_entries(s)  # fmt: skip


class Qwen3(_AnyQwen):
    """Qwen 3 (dense), with norms of each head's queries and keys."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    rank = 41
    defaults = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "tie_word_embeddings": False, "attention_bias": False, **NO_DROPOUT, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28, "layer_types": None, "is_causal": True, **ROTARY_DEFAULTS,
    }  # fmt: skip
    # because: its biases would be those of attention alone, for which lmtrain has no word
    required = {"attention_bias": False, "is_causal": True}
    words = {"norm": "rmsnorm", "gated": True, "bias": "none", "qk_norm": "head"}
    names = llama_like_names({"attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)})

    def config(self, s: GPTSettings) -> Config:
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": ACTIVATION_NAMES[s.activation],
            "rms_norm_eps": s.norm_eps, "attention_bias": False,
            **NO_DROPOUT,
        } | late_window_entries(s) | rotary_entries(s)  # fmt: skip
