"""Hugging Face's Qwen 2 and 2.5, with biases of queries, keys and values, and dense Qwen 3, with norms of each head's
queries and keys. Found by ../family.py.
"""

from __future__ import annotations

from typing import ClassVar

from lmtrain.exchange.exchanged_settings import word_rules
from lmtrain.exchange.huggingface.decoder_config import (
    ACTIVATION_NAMES,
    activation_setting,
    late_window_entries,
    late_window_settings,
    llama_like_names,
    require_values,
    rotary_layer_rules,
    size_entries,
    size_settings,
)
from lmtrain.exchange.huggingface.family import Config, Family, Rule
from lmtrain.exchange.huggingface.rotary_config import (
    ROTARY_DEFAULTS,
    ROTARY_KEYS,
    ROTARY_WORDS,
    rotary_entries,
    rotary_settings,
)
from lmtrain.models.gpt_settings import GPTSettings


class Qwen2(Family[GPTSettings]):
    """Qwen 2 and 2.5, with biases of queries, keys and values, and windows in later layers or none."""

    model_type: ClassVar[str] = "qwen2"
    architecture = "Qwen2ForCausalLM"
    settings_class = GPTSettings
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
    dropouts = ("attention_dropout",)
    tokenizer_class = "Qwen2Tokenizer"
    has_own_tokenizer = True
    rotary_keys = ROTARY_KEYS
    names = llama_like_names({"attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)})

    def rules(self, settings: GPTSettings) -> list[Rule]:
        return [
            *word_rules(
                settings, free=("tied", "activation", "window", "layer_pattern", *ROTARY_WORDS), positions="rotary",
                norm="rmsnorm", gated=True, bias="qkv",
            ),
            *rotary_layer_rules(settings),
        ]  # fmt: skip

    def config(self, settings: GPTSettings) -> Config:
        s = settings
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": ACTIVATION_NAMES[s.activation],
            # because: theirs would drop attention alone, which is not how this model was trained
            "rms_norm_eps": s.norm_eps, "attention_dropout": 0.0,
        } | late_window_entries(s) | rotary_entries(s)  # fmt: skip

    def settings(self, config: Config, problems: list[str]) -> Config:
        c = config
        require_values(c, problems, self.required)
        return size_settings(c) | rotary_settings(c, problems) | late_window_settings(c, problems) | {
            "num_kv_heads": c["num_key_value_heads"], "head_width": c["head_dim"], "positions": "rotary",
            "norm": "rmsnorm", "norm_eps": c["rms_norm_eps"],
            "activation": activation_setting(c, "hidden_act", problems), "gated": True, "bias": "qkv",
        }  # fmt: skip


class Qwen3(Family[GPTSettings]):
    """Qwen 3 (dense), with norms of each head's queries and keys."""

    model_type: ClassVar[str] = "qwen3"
    architecture = "Qwen3ForCausalLM"
    settings_class = GPTSettings
    rank = 41
    defaults = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28, "layer_types": None, "is_causal": True, **ROTARY_DEFAULTS,
    }  # fmt: skip
    # because: its biases would be those of attention alone, for which lmtrain has no word
    required = {"attention_bias": False, "is_causal": True}
    dropouts = ("attention_dropout",)
    tokenizer_class = "Qwen2Tokenizer"
    rotary_keys = ROTARY_KEYS
    names = llama_like_names({
        "attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",),
        "attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",),
    })  # fmt: skip

    def rules(self, settings: GPTSettings) -> list[Rule]:
        return [
            *word_rules(
                settings, free=("tied", "activation", "window", "layer_pattern", *ROTARY_WORDS), positions="rotary",
                norm="rmsnorm", gated=True, bias="none", qk_norm="head",
            ),
            *rotary_layer_rules(settings),
        ]  # fmt: skip

    def config(self, settings: GPTSettings) -> Config:
        s = settings
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": ACTIVATION_NAMES[s.activation],
            "rms_norm_eps": s.norm_eps, "attention_bias": False,
            # because: theirs would drop attention alone, which is not how this model was trained
            "attention_dropout": 0.0,
        } | late_window_entries(s) | rotary_entries(s)  # fmt: skip

    def settings(self, config: Config, problems: list[str]) -> Config:
        c = config
        require_values(c, problems, self.required)
        return size_settings(c) | rotary_settings(c, problems) | late_window_settings(c, problems) | {
            "num_kv_heads": c["num_key_value_heads"], "head_width": c["head_dim"], "positions": "rotary",
            "norm": "rmsnorm", "norm_eps": c["rms_norm_eps"], "qk_norm": "head",
            "activation": activation_setting(c, "hidden_act", problems), "gated": True, "bias": "none",
        }  # fmt: skip
