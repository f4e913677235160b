"""Hugging Face's Granite 3 and its like: a LLaMA with factors of embeddings, scores, branches and logits. Found by
../model_family_base.py.
"""

from __future__ import annotations

from lmtrain.config.settings_base import show
from lmtrain.exchange.huggingface.model_family_base import Config, Rule
from lmtrain.exchange.huggingface.rotary_config import ROTARY_DEFAULTS, is_number, rotary_entries, rotary_settings
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    ACTIVATION_NAMES,
    BIASES,
    NO_DROPOUT,
    RotaryDecoder,
    activation_setting,
    bias_setting,
    layer_rules,
    size_entries,
)
from lmtrain.models.gpt_settings import GPTSettings


class Granite(RotaryDecoder):
    """Granite 3 and others of its form without experts."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"
    rank = 70
    defaults = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        "is_causal": True, **ROTARY_DEFAULTS,
    }  # fmt: skip
    required = {"is_causal": True}
    tokenizer_class = "GPT2Tokenizer"
    words = {"norm": "rmsnorm", "gated": True}
    free = ("activation", "embedding_scale", "attention_scale", "residual_scale", "logit_scale")

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [*self.word_rules(s, bias=tuple(BIASES)), *layer_rules(s)]

    def config(self, s: GPTSettings) -> Config:
        attention_bias, mlp_bias = BIASES[s.bias]
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": ACTIVATION_NAMES[s.activation],
            "rms_norm_eps": s.norm_eps, "attention_bias": attention_bias, "mlp_bias": mlp_bias,
            **NO_DROPOUT, "embedding_multiplier": s.embedding_scale,
            # because: despite its name it is the scale of scores itself, not a factor of the usual one
            "attention_multiplier": s.head**-0.5 if s.attention_scale is None else s.attention_scale,
            "residual_multiplier": s.residual_scale, "logits_scaling": _inverse(s.logit_scale),
        } | rotary_entries(s)  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        bias, divisor = bias_setting(c), c["logits_scaling"]
        if bias is None:
            problems.append(
                f"attention_bias={show(c['attention_bias'])} would have to be false, or mlp_bias be true with it"
            )
        if not is_number(divisor) or divisor <= 0:
            problems.append(f"logits_scaling={show(divisor)} would have to be a number above 0")
            divisor = 1
        return self.common_settings(c) | rotary_settings(c, problems) | {
            "norm_eps": c["rms_norm_eps"], "bias": bias or "none",
            "activation": activation_setting(c, "hidden_act", problems), "embedding_scale": c["embedding_multiplier"],
            "attention_scale": c["attention_multiplier"], "residual_scale": c["residual_multiplier"],
            "logit_scale": _inverse(divisor),
        }  # fmt: skip


def _inverse(value: float) -> float:
    """Return 1 / `value`, or the number with few digits whose inverse is `value` if there is one.

    because: 1 / (1 / 49) is not 49 in floating point
    """
    short = float(f"{1 / value:.12g}")
    return short if 1 / short == value else 1 / value
