"""Hugging Face's LLaMA 1 to 3.2, and SmolLM 1 and 2, which are LLaMAs. Found by ../model_family_base.py."""

from __future__ import annotations

from lmtrain.config.settings_base import show
from lmtrain.exchange.huggingface.model_family_base import Config, Rule
from lmtrain.exchange.huggingface.rotary_config import ROTARY_DEFAULTS, rotary_entries, rotary_settings
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    BIASES,
    NO_DROPOUT,
    RotaryDecoder,
    bias_setting,
    layer_rules,
    size_entries,
)
from lmtrain.models.gpt_settings import GPTSettings


class LLaMA(RotaryDecoder):
    """LLaMA 1 to 3.2, SmolLM 1 and 2, and others of their form."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    rank = 20
    defaults = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "is_causal": True, **ROTARY_DEFAULTS,
    }  # fmt: skip
    required = {"hidden_act": "silu", "is_causal": True}
    inert = {
        "sliding_window": "a LLaMA has no window in transformers",
        "pretraining_tp": "it is how transformers computes, with the same result",
    }
    tokenizer_class = "LlamaTokenizer"
    words = {"norm": "rmsnorm", "activation": "silu", "gated": True}

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [
            *self.word_rules(s, bias=tuple(BIASES)),
            *layer_rules(s),
            (s.width % s.num_heads == 0, f"model.num_heads={s.num_heads} would have to divide {s.width}"),
        ]  # fmt: skip

    def config(self, s: GPTSettings) -> Config:
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": "silu", "rms_norm_eps": s.norm_eps,
            **NO_DROPOUT, "attention_bias": s.bias == "all", "mlp_bias": s.bias in ("all", "mlp"),
        } | rotary_entries(s)  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        bias = bias_setting(c)
        if bias is None:
            problems.append(
                f"attention_bias={show(c['attention_bias'])} and mlp_bias={show(c['mlp_bias'])} would have to be both "
                "false, both true, or true for mlp_bias alone"
            )
        return self.common_settings(c) | rotary_settings(c, problems) | {"norm_eps": c["rms_norm_eps"], "bias": bias}
