"""Hugging Face's Phi-3 and Phi-4: LLaMA's blocks with fused linears and longrope angles.

Found by ../model_family_base.py.
"""

from __future__ import annotations

from dataclasses import replace

from lmtrain.config.settings_base import show
from lmtrain.exchange.huggingface.model_family_base import Config, Rule
from lmtrain.exchange.huggingface.rotary_config import ROTARY_DEFAULTS, ROTARY_KEYS, rotary_entries, rotary_settings
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    ACTIVATION_NAMES,
    RotaryDecoder,
    activation_setting,
    layer_rules,
    llama_like_names,
    size_entries,
)
from lmtrain.models.gpt_settings import GPTSettings

_SCALING_KEYS = ("short_factor", "long_factor")


class Phi3(RotaryDecoder):
    """Phi-3, Phi-3.5 and Phi-4, with fused linears, longrope angles and partly turned heads."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    rank = 60
    defaults = {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": False, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "sliding_window": None, "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1,
        "interpolate_factor": 1, "is_causal": True, **ROTARY_DEFAULTS, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    required = {
        "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1,
        "is_causal": True,
    }  # fmt: skip
    dropouts = ("attention_dropout", "resid_pdrop", "embd_pdrop")
    tokenizer_class = "LlamaTokenizer"
    words = {"norm": "rmsnorm", "gated": True, "bias": "none"}
    free = ("activation", "rotary_share")
    rotary_keys = (*ROTARY_KEYS, "partial_rotary_factor")
    names = llama_like_names({"attention.qkv": ("self_attn.qkv_proj",), "mlp.up": ("mlp.gate_up_proj",)})

    def rules(self, s: GPTSettings) -> list[Rule]:
        usual = replace(s, rotary_attention_factor=None).angle_factor
        longest = s.rotary_factor * (s.rotary_original_len or 1)
        is_scaled = s.rotary_scaling == "longrope"
        return [
            *self.word_rules(s),
            *layer_rules(s, may_have_window=True),
            (is_scaled or s.rotary_scaling == "none",
             f"model.rotary_scaling={s.rotary_scaling} would have to be none or longrope"),
            (not is_scaled or s.angle_factor == usual,
             f"model.rotary_attention_factor={show(s.rotary_attention_factor)} would have to be null"),
            (not is_scaled or longest == int(longest),
             f"model.rotary_factor={show(s.rotary_factor)} would have to give a whole number of positions with "
             f"model.rotary_original_len={s.rotary_original_len}"),
            (not is_scaled or s.head * s.num_heads == s.width,
             f"model.head_width={s.head} would have to be {s.width}/{s.num_heads} with model.rotary_scaling=longrope"),
        ]  # fmt: skip

    def config(self, s: GPTSettings) -> Config:
        entries = size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": ACTIVATION_NAMES[s.activation],
            # because: theirs would leave embeddings as they are, which is not how this model was trained
            "rms_norm_eps": s.norm_eps, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
            "sliding_window": s.window if s.layer_kinds[0].window else None,
        } | rotary_entries(s, default_share=1.0)  # fmt: skip
        if s.rotary_scaling == "longrope":
            # because: transformers 4 takes the factor from the two lengths, and no other keys in the group
            lists = {key: entries["rope_scaling"][key] for key in _SCALING_KEYS}
            entries["rope_scaling"] = {"type": "longrope", **lists}
            entries["max_position_embeddings"] = int(s.rotary_factor * (s.rotary_original_len or 1))
        return entries

    def settings(self, c: Config, problems: list[str]) -> Config:
        rotary = rotary_settings(c, problems, default_share=1.0)
        if (kind := rotary.get("rotary_scaling", "none")) not in ("none", "longrope"):
            problems.append(f"rope_scaling has angles of type {kind}, which would have to be default or longrope")
        return self.common_settings(c) | rotary | {
            "norm_eps": c["rms_norm_eps"], "window": c["sliding_window"],
            "activation": activation_setting(c, "hidden_act", problems),
        }  # fmt: skip
