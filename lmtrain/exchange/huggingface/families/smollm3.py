"""Hugging Face's SmolLM3: a LLaMA in which some layers turn no queries and keys. Found by ../model_family_base.py."""

from __future__ import annotations

from lmtrain.config.settings_base import show
from lmtrain.errors import shorten
from lmtrain.exchange.huggingface.model_family_base import Config, Rule
from lmtrain.exchange.huggingface.rotary_config import ROTARY_DEFAULTS, rotary_entries, rotary_settings
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    BIASES,
    NO_DROPOUT,
    RotaryDecoder,
    all_but_each,
    flag_setting,
    layer_kinds,
    layer_types,
    pattern_setting,
    size_entries,
)
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import MAX_LAYERS

_BASE = 2000000.0  # that transformers takes where the file has none


class SmolLM3(RotaryDecoder):
    """SmolLM3."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    rank = 50
    defaults = {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "use_sliding_window": False, "sliding_window": None, "layer_types": None, "no_rope_layers": None,
        "no_rope_layer_interval": 4, "is_causal": True, **ROTARY_DEFAULTS,
    }  # fmt: skip
    required = {"hidden_act": "silu", "is_causal": True}
    tokenizer_class = "PreTrainedTokenizer"
    words = {"norm": "rmsnorm", "activation": "silu", "gated": True}

    def rules(self, s: GPTSettings) -> list[Rule]:
        return self.word_rules(s, bias=tuple(BIASES))

    def config(self, s: GPTSettings) -> Config:
        head = {"head_dim": s.head} if s.head * s.num_heads != s.width else {}
        return size_entries(s) | head | {
            "num_key_value_heads": s.kv_heads, "hidden_act": "silu", "rms_norm_eps": s.norm_eps,
            **NO_DROPOUT, "attention_bias": s.bias == "all", "mlp_bias": s.bias in ("all", "mlp"),
            "no_rope_layers": [int(kind.rotary) for kind in s.layer_kinds], "layer_types": layer_types(s),
            "use_sliding_window": any(kind.window for kind in s.layer_kinds), "sliding_window": s.window,
        } | rotary_entries(s)  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        of_attention, of_mlp = (flag_setting(c, key, problems) for key in ("attention_bias", "mlp_bias"))
        if of_attention and not of_mlp:
            problems.append("attention_bias=true would have to be false, or mlp_bias to be true")
        turns = _layers_that_turn(c, problems)
        windows = _layers_with_window(c, turns, problems)
        return self.common_settings(c) | rotary_settings(c, problems, default_base=_BASE) | {
            "norm_eps": c["rms_norm_eps"], "bias": "all" if of_attention else "mlp" if of_mlp else "none",
            "window": c["sliding_window"] if any(windows) else None, "layer_pattern": pattern_setting(windows, turns),
        }  # fmt: skip


def _layers_that_turn(c: Config, problems: list[str]) -> list[bool]:
    """Return for each layer of a SmolLM3 whether it has rotary angles. The config.json `c` says so by a 1 in
    no_rope_layers; if that is null, all layers have them but the last of every no_rope_layer_interval. Append a message
    to `problems` if an entry is invalid.
    """
    flags, period = c["no_rope_layers"], c["no_rope_layer_interval"]
    count = c["num_hidden_layers"] if type(c["num_hidden_layers"]) is int else 0
    if flags is None:
        if type(period) is not int or period < 1:
            problems.append(f"no_rope_layer_interval={shorten(show(period))} would have to be a whole number above 0")
            period = 1
        return all_but_each(period, count)
    if not isinstance(flags, list) or len(flags) < count or any(type(x) is not int or x not in (0, 1) for x in flags):
        problems.append(f"no_rope_layers would have to be a list of {count} times 0 or 1, as num_hidden_layers says")
        return [True] * min(count, MAX_LAYERS + 1)
    return [flag == 1 for flag in flags[:count]]  # because: transformers lets the list be longer


def _layers_with_window(c: Config, turns: list[bool], problems: list[str]) -> list[bool]:
    """Return for each layer of a SmolLM3 whether it has a window, from layer_types of the config.json `c`. If that is
    null, the layers without rotary angles (False in `turns`) have one, provided that use_sliding_window is true. Append
    a message to `problems` if the entries contradict each other.
    """
    uses = flag_setting(c, "use_sliding_window", problems)
    windows = layer_kinds(c["layer_types"], len(turns), problems)
    if windows is None:
        return [uses and c["sliding_window"] is not None and not turned for turned in turns]
    if any(windows) and (not uses or c["sliding_window"] is None):
        problems.append(
            "layer_types with sliding_attention would have to go with use_sliding_window=true and a sliding_window"
        )
    return windows
