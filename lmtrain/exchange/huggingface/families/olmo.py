"""Hugging Face's OLMo 1, whose norms have no weights, 2, with norms after its branches, and 3.

Found by ../model_family_base.py.

Of an OLMo 3 transformers 4 reads one rope_theta for all layers and a rope_scaling for those without a window; 5 reads
both of each kind of layers from a group in rope_parameters. A file that they would read differently is refused.
"""

from __future__ import annotations

from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.exchange.huggingface.model_family_base import Config, Rule
from lmtrain.exchange.huggingface.rotary_config import (
    DEFAULT_BASE,
    ROTARY_DEFAULTS,
    angle_type,
    check_numbers_of_group,
    rope_scaling,
    rotary_entries,
    rotary_settings,
    scaling_settings,
)
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    FULL_LAYER,
    NO_DROPOUT,
    WINDOW_LAYER,
    RotaryDecoder,
    all_but_each,
    layer_kinds,
    layer_rules,
    layer_types,
    llama_like_names,
    pattern_setting,
    size_entries,
)
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.rotary_settings import RotarySettings

_OLMO1_EPS = 1e-5  # which no key of config.json changes
_PERIOD = 4  # layers, of which the last has no window if the file does not list them
_BASE_OF_5 = 500000.0  # that transformers 5 takes where a group has none
_WORDS: dict[str, Any] = {"activation": "silu", "gated": True, "bias": "none"}
_KEYS_OF_ALL = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}  # of a group, whatever its type of scaling


class OLMo2(RotaryDecoder):
    """OLMo 2."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    rank = 80
    defaults = {
        "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "is_causal": True,
        **ROTARY_DEFAULTS,
    }  # fmt: skip
    required = {"hidden_act": "silu", "is_causal": True, "attention_bias": False}
    tokenizer_class = "GPTNeoXTokenizer"
    names = llama_like_names({
        "attention_out_norm": ("post_attention_layernorm",), "mlp_out_norm": ("post_feedforward_layernorm",),
        "attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",),
    })  # fmt: skip
    words = {**_WORDS, "norm": "rmsnorm", "norm_order": "branch", "qk_norm": "whole"}

    def rules(self, s: GPTSettings) -> list[Rule]:
        kind, factor = s.rotary_scaling, s.rotary_factor
        return [
            *self.word_rules(s, norm_bias=False),
            *layer_rules(s),
            # because: transformers 4 opens no others
            (kind in ("none", "linear"), f"model.rotary_scaling={kind} would have to be none or linear"),
            (kind != "linear" or factor > 1, f"model.rotary_factor={show(factor)} would have to be above 1"),
        ]

    def config(self, s: GPTSettings) -> Config:
        entries = _entries_of_all(s) | {"rms_norm_eps": s.norm_eps} | rotary_entries(s)
        if s.rotary_scaling == "linear":
            # because: transformers 4 opens an OLMo with these two keys alone
            entries["rope_scaling"] = {"type": "linear", "factor": s.rotary_factor}
        return entries

    def settings(self, c: Config, problems: list[str]) -> Config:
        rotary = rotary_settings(c, problems)
        kind = rotary.get("rotary_scaling", "none")
        if kind not in ("none", "linear"):
            problems.append(f"rotary angles of type {kind} would have to be default or linear, as transformers 4 opens "
                            f"no {self.model_type} with others")  # fmt: skip
        return self.common_settings(c) | rotary | {"norm_eps": c["rms_norm_eps"]}


class OLMo(OLMo2):
    """OLMo 1, unless its queries, keys and values are clipped."""

    model_type = "olmo"
    architecture = "OlmoForCausalLM"
    rank = 81
    defaults = {
        **{key: value for key, value in OLMo2.defaults.items() if key != "rms_norm_eps"}, "clip_qkv": None
    }  # fmt: skip
    required = {**OLMo2.required, "clip_qkv": None}
    names = llama_like_names()
    words = {**_WORDS, "norm": "layernorm", "norm_weight": "none"}

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [
            *super().rules(s),
            (s.norm_eps == _OLMO1_EPS, f"model.norm_eps={s.norm_eps:g} would have to be {_OLMO1_EPS:g}"),
        ]

    def config(self, s: GPTSettings) -> Config:
        return {key: value for key, value in super().config(s).items() if key != "rms_norm_eps"}

    def settings(self, c: Config, problems: list[str]) -> Config:
        return super().settings({**c, "rms_norm_eps": _OLMO1_EPS}, problems)


class OLMo3(OLMo2):
    """OLMo 3, with scaled angles in layers without a window or not."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    rank = 82
    defaults = {**OLMo2.defaults, "sliding_window": 4096, "layer_types": None}
    tokenizer_class = "GPT2Tokenizer"
    # because: transformers 5 does not read `truncate` in a group of rope_parameters
    words = {**OLMo2.words, "rotary_rounds": True}
    free = ("local_rotary_base",)

    def rules(self, s: GPTSettings) -> list[Rule]:
        own, base = s.local_rotary_base, s.rotary_base
        has_windows = any(kind.window for kind in s.layer_kinds)
        is_unscaled = own == base or (own is None and s.rotary_scaling == "none")
        return [
            *self.word_rules(s, norm_bias=False),
            (all(kind.rotary for kind in s.layer_kinds),
             f"model.layer_pattern={show(s.layer_pattern)} would have to give all layers rotary angles"),
            (not has_windows or is_unscaled,
             f"model.local_rotary_base={show(own)} would have to be {show(base)}, the base of all layers"),
        ]  # fmt: skip

    def config(self, s: GPTSettings) -> Config:
        base = {"rope_theta": s.rotary_base}
        groups = {FULL_LAYER: rope_scaling(s) | base, WINDOW_LAYER: {"rope_type": "default"} | base}
        return _entries_of_all(s) | {
            "rms_norm_eps": s.norm_eps, "layer_types": layer_types(s),
            # because: transformers builds the mask of a window even where no layer has one
            "sliding_window": 4096 if s.window is None else s.window,
        } | rotary_entries(s) | {"rope_parameters": groups}  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        num_layers = c["num_hidden_layers"]
        windows = layer_kinds(c["layer_types"], num_layers, problems)
        windows = all_but_each(_PERIOD, num_layers) if windows is None else windows
        if any(windows) and c["sliding_window"] is None:
            problems.append("sliding_window would have to be set, as there are layers with a window")
        return self.common_settings(c) | {
            "norm_eps": c["rms_norm_eps"], "window": c["sliding_window"] if any(windows) else None,
            "layer_pattern": pattern_setting(windows),
        } | _angles_by_layer(c, windows, problems)  # fmt: skip


def _entries_of_all(s: GPTSettings) -> Config:
    """Return the entries of config.json that OLMo models of all versions share: sizes, heads, activation and no
    dropout.
    """
    head = {"head_dim": s.head} if s.head * s.num_heads != s.width else {}
    return size_entries(s) | head | {
        "num_key_value_heads": s.kv_heads, "hidden_act": "silu", "attention_bias": False,
        **NO_DROPOUT,
    }  # fmt: skip


def _angles_by_layer(c: Config, windows: list[bool], problems: list[str]) -> Config:
    """Return lmtrain's settings of rotary angles for the config.json `c` of an OLMo 3; `windows` tells for each layer
    whether it has a window. Append a message to `problems` for angles that lmtrain does not compute or that
    transformers 4 and 5 read differently. Return {} if the entries are no groups of rotary angles.
    """
    groups, old = c["rope_parameters"] or {}, c["rope_scaling"] or {}
    is_group = isinstance(groups, dict) and all(isinstance(group, dict | None) for group in groups.values())
    if not is_group or not groups.keys() <= {FULL_LAYER, WINDOW_LAYER} or not isinstance(old, dict):
        problems.append(
            f"rope_parameters would have to consist of the groups {FULL_LAYER} and {WINDOW_LAYER}, and rope_scaling "
            "would have to be a group"
        )
        return {}
    full, local = {**(groups.get(FULL_LAYER) or {}), **old}, groups.get(WINDOW_LAYER) or {}
    # because: transformers 5 adds the group's numbers to those of rope_scaling, which 4 reads alone
    if old and _complete_scaling(full, c) != _complete_scaling(old, c):
        problems.append(f"rope_scaling would have to have all numbers that {FULL_LAYER} has in rope_parameters")
    if any(share not in (None, 1.0) for share in (x.get("partial_rotary_factor") for x in (c, full, local))):
        problems.append("partial_rotary_factor would have to be 1, over the whole head")
    has_full, has_local = not all(windows), any(windows)
    key = "rope_scaling" if old else f"{FULL_LAYER} of rope_parameters"
    check_numbers_of_group(full, angle_type(full), key, c, problems)
    if has_local and (local.keys() - _KEYS_OF_ALL or angle_type(local) != "default"):
        problems.append(f"rotary angles of {WINDOW_LAYER} would have to be of type default, without numbers")
    # because: transformers 5 gives rope_theta to the layers without a window alone
    bases = [full.get("rope_theta") or c["rope_theta"] or _BASE_OF_5] if has_full else []
    bases += [local.get("rope_theta") or _BASE_OF_5] if has_local else []
    bases += [c["rope_theta"] or DEFAULT_BASE] if c["rope_theta"] is not None or old or not groups else []
    if any(base != bases[0] for base in bases):
        problems.append(
            f"rope_theta={' and '.join(map(show, bases))} would have to be the same for all layers, and for "
            "transformers 4 and 5: set it in both groups of rope_parameters, and beside them"
        )
    scaling = scaling_settings(full, "rope_scaling" if old else "rope_parameters", c, problems) if has_full else {}
    is_scaled = scaling.get("rotary_scaling", "none") != "none"
    own_base = {"local_rotary_base": bases[0]} if is_scaled and has_local else {}
    return {"rotary_base": bases[0]} | scaling | own_base


def _complete_scaling(group: Config, c: Config) -> tuple[Config, list[str]]:
    """Return (all of lmtrain's settings of rotary angles for a group of the config.json `c`, with the defaults of those
    that the group leaves out; the group's problems).
    """
    problems: list[str] = []
    return {**vars(RotarySettings()), **scaling_settings(group, "rope_scaling", c, problems)}, problems
