"""Hugging Face's Granite 3 and its like: a LLaMA with factors of embeddings, scores, branches and logits. Found by
../family.py.
"""

from __future__ import annotations

from typing import ClassVar

from lmtrain.config.settings_base import show
from lmtrain.exchange.exchanged_settings import word_rules
from lmtrain.exchange.huggingface.decoder_config import (
    ACTIVATION_NAMES,
    activation_setting,
    layer_rules,
    llama_like_names,
    require_values,
    size_entries,
    size_settings,
)
from lmtrain.exchange.huggingface.family import Config, Family, Rule
from lmtrain.exchange.huggingface.rotary_config import (
    ROTARY_DEFAULTS,
    ROTARY_KEYS,
    ROTARY_WORDS,
    is_number,
    rotary_entries,
    rotary_settings,
)
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.spec import LayerKind

# Our word for the linears that have biases, by (attention_bias, mlp_bias).
_BIASES = {(False, False): "none", (True, True): "all", (False, True): "mlp"}


class Granite(Family[GPTSettings]):
    """Granite 3 and others of its form without experts."""

    model_type: ClassVar[str] = "granite"
    architecture = "GraniteForCausalLM"
    settings_class = GPTSettings
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
    dropouts = ("attention_dropout",)
    tokenizer_class = "GPT2Tokenizer"
    rotary_keys = ROTARY_KEYS
    names = llama_like_names({"attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)})

    def rules(self, settings: GPTSettings) -> list[Rule]:
        factors = ("embedding_scale", "attention_scale", "residual_scale", "logit_scale")
        return [
            *word_rules(
                settings, free=("tied", "window", "layer_pattern", "activation", *factors, *ROTARY_WORDS),
                positions="rotary", norm="rmsnorm", gated=True, bias=tuple(_BIASES.values()),
            ),
            *layer_rules(settings, LayerKind(rotary=True)),
        ]  # fmt: skip

    def config(self, settings: GPTSettings) -> Config:
        s = settings
        attention_bias, mlp_bias = next(biases for biases, word in _BIASES.items() if word == s.bias)
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": ACTIVATION_NAMES[s.activation],
            "rms_norm_eps": s.norm_eps, "attention_bias": attention_bias, "mlp_bias": mlp_bias,
            # because: theirs would drop attention alone, which is not how this model was trained
            "attention_dropout": 0.0, "embedding_multiplier": s.embedding_scale,
            # because: despite its name it is the scale of scores itself, not a factor of the usual one
            "attention_multiplier": s.head**-0.5 if s.attention_scale is None else s.attention_scale,
            "residual_multiplier": s.residual_scale, "logits_scaling": _inverse(s.logit_scale),
        } | rotary_entries(s)  # fmt: skip

    def settings(self, config: Config, problems: list[str]) -> Config:
        c = config
        require_values(c, problems, self.required)
        biases, divisor = (c["attention_bias"], c["mlp_bias"]), c["logits_scaling"]
        bias = next((word for choice, word in _BIASES.items() if choice == biases), None)
        if bias is None:
            problems.append(f"attention_bias={show(biases[0])} would have to be false, or mlp_bias be true with it")
        if not is_number(divisor) or divisor <= 0:
            problems.append(f"logits_scaling={show(divisor)} would have to be a number above 0")
            divisor = 1
        return size_settings(c) | rotary_settings(c, problems) | {
            "num_kv_heads": c["num_key_value_heads"], "head_width": c["head_dim"], "positions": "rotary",
            "norm": "rmsnorm", "norm_eps": c["rms_norm_eps"], "gated": True, "bias": bias or "none",
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
