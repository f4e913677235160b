"""Hugging Face's Mistral, in all of whose layers attention has the same window or none. Found by ../family.py."""

from __future__ import annotations

from typing import Any, ClassVar

from lmtrain.exchange.exchanged_settings import word_rules
from lmtrain.exchange.huggingface.decoder_config import (
    FULL_LAYER,
    WINDOW_LAYER,
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
    rotary_entries,
    rotary_settings,
)
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.spec import LayerKind

_NOT_READ = "transformers does not read it in a model of this type"


class Mistral(Family[GPTSettings]):
    """Mistral 7B, with a window or without."""

    model_type: ClassVar[str] = "mistral"
    architecture = "MistralForCausalLM"
    settings_class = GPTSettings
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
    inert = {"use_sliding_window": _NOT_READ, "max_window_layers": _NOT_READ}
    dropouts = ("attention_dropout",)
    tokenizer_class = "LlamaTokenizer"
    rotary_keys = ROTARY_KEYS
    names = llama_like_names({"attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)})

    def rules(self, settings: GPTSettings) -> list[Rule]:
        return [
            *word_rules(
                settings, free=("tied", "window", "layer_pattern", *ROTARY_WORDS), positions="rotary", norm="rmsnorm",
                activation="silu", gated=True, bias="none",
            ),
            *layer_rules(settings, LayerKind(rotary=True), LayerKind(window=True, rotary=True)),
        ]  # fmt: skip

    def config(self, settings: GPTSettings) -> Config:
        s = settings
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": "silu", "rms_norm_eps": s.norm_eps,
            # because: theirs would drop attention alone, which is not how this model was trained
            "attention_dropout": 0.0, "sliding_window": s.window if s.layer_kinds[0].window else None,
        } | rotary_entries(s)  # fmt: skip

    def settings(self, config: Config, problems: list[str]) -> Config:
        c = config
        require_values(c, problems, self.required)
        return size_settings(c) | rotary_settings(c, problems) | {
            "num_kv_heads": c["num_key_value_heads"], "head_width": c["head_dim"], "positions": "rotary",
            "norm": "rmsnorm", "norm_eps": c["rms_norm_eps"], "activation": "silu", "gated": True, "bias": "none",
            "window": _window(c, problems),
        }  # fmt: skip


def _window(c: Config, problems: list[str]) -> Any:
    """Return the window of the Mistral with the config.json `c`, None for none. Add a message to `problems` if its
    layers differ: transformers loads a Mistral with `layer_types` as a Ministral, which may have a window in some.
    """
    kinds = c["layer_types"]
    if kinds is None:
        return c["sliding_window"]
    kind = kinds[0] if isinstance(kinds, list) and kinds else None
    if kind not in (WINDOW_LAYER, FULL_LAYER) or kinds.count(kind) < len(kinds):
        problems.append(f"layer_types would have to be the same for all layers, {WINDOW_LAYER} or {FULL_LAYER}")
    return c["sliding_window"] if kind == WINDOW_LAYER else None
