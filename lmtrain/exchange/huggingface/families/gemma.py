"""Hugging Face's Gemma, Gemma 2 and the language model of Gemma 3. Found by ../model_family_base.py.

Their norms multiply by 1 + weight. Embeddings are multiplied by the square root of the width, rounded to the type of
the stored weights: sqrt(3072) is 55.5 in bf16. An import takes that number, and an export must give it again.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any, ClassVar

from lmtrain.config.settings_base import show
from lmtrain.errors import way
from lmtrain.exchange.huggingface.model_family_base import Config, Rule, require_values
from lmtrain.exchange.huggingface.rotary_config import (
    ROTARY_DEFAULTS,
    ROTARY_KEYS,
    check_numbers_of_group,
    is_number,
    rotary_entries,
    rotary_settings,
    scaling_settings,
    value_of_both_forms,
)
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    ACTIVATION_NAMES,
    NO_DROPOUT,
    RotaryDecoder,
    activation_setting,
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

_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # torch's names -> ours
_GELU_NAMES = ACTIVATION_NAMES | {"gelu_tanh": "gelu_pytorch_tanh"}
_DEFAULTS: Config = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False,
    "attention_dropout": 0.0, "use_bidirectional_attention": None, "is_causal": True, "dtype": None,
    "torch_dtype": None, **ROTARY_DEFAULTS,
}  # fmt: skip
_INERT = {"cache_implementation": "it is about how texts are generated"}
_FULL, _LOCAL = "full_attention", "sliding_attention"  # the groups of rope_parameters


def rounded(value: float, dtype: str) -> float:
    """Return `value` rounded to a number type: "float16", "bfloat16" or "float32", as torch calls them."""
    if dtype == "float16":
        return float(struct.unpack("e", struct.pack("e", value))[0])
    if dtype == "bfloat16":
        (bits,) = struct.unpack("I", struct.pack("f", value))
        bits += 0x7FFF + (bits >> 16 & 1)  # because: a number halfway between two goes to the even one
        return float(struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))[0])
    return float(struct.unpack("f", struct.pack("f", value))[0])


class _AnyGemma(RotaryDecoder):
    """The common part of the three Gemmas, which differ in norms, activations, layers and caps."""

    tokenizer_class = "GemmaTokenizer"
    words = {"norm": "rmsnorm", "norm_weight": "from_zero", "gated": True, "bias": "none"}
    free: ClassVar[tuple[str, ...]] = ("embedding_scale",)

    def rules(self, s: GPTSettings) -> list[Rule]:
        exact = math.sqrt(s.width)
        return [
            *self.word_rules(s),
            (rounded(s.embedding_scale, "float32") in (rounded(exact, dtype) for dtype in _TYPES),
             f"model.embedding_scale={show(s.embedding_scale)} would have to be {exact:g}, the square root of "
             f"model.width, as fp32, bf16 or fp16 rounds it"),
        ]  # fmt: skip

    def config(self, s: GPTSettings) -> Config:
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "rms_norm_eps": s.norm_eps, "attention_bias": False,
            **NO_DROPOUT,
        }  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        require_values(c, problems, {"attention_bias": False, "is_causal": True})
        if c["use_bidirectional_attention"]:
            problems.append(
                f"use_bidirectional_attention={show(c['use_bidirectional_attention'])} would have to be false"
            )
        return self.common_settings(c) | {
            "norm_eps": c["rms_norm_eps"], "embedding_scale": _embedding_scale(c, problems)
        }  # fmt: skip

    def dtype_problem(self, s: GPTSettings, dtype: str) -> str:
        scale = s.embedding_scale
        exact = math.sqrt(s.width)
        if rounded(scale, "float32") == rounded(exact, dtype):
            return ""
        fitting = [ours for name, ours in _TYPES.items() if rounded(exact, name) == rounded(scale, "float32")]
        return (
            f"model.embedding_scale={show(scale)}, and transformers multiplies embeddings by {rounded(exact, dtype):g} "
            f"where weights are {_TYPES[dtype]}: the square root of the width, rounded to their type. "
            f"Use {' or '.join(way('--dtype', name) for name in fitting)}."
        )

    def in_fp32(self, s: GPTSettings) -> GPTSettings:
        return replace(s, embedding_scale=rounded(math.sqrt(s.width), "float32"))


class Gemma(_AnyGemma):
    """Gemma 1."""

    model_type = "gemma"
    architecture = "GemmaForCausalLM"
    rank = 60
    defaults = _DEFAULTS | {
        "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    inert = _INERT | {"hidden_activation": "transformers reads hidden_act in its place"}
    # because: "gelu" stands for the tanh form here, but transformers 4.57 computes the exact one
    rewritten = ("hidden_act",)
    load_options = {"hidden_act": "gelu_pytorch_tanh"}
    words = {**_AnyGemma.words, "activation": "gelu_tanh"}

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [*super().rules(s), *layer_rules(s)]

    def config(self, s: GPTSettings) -> Config:
        return super().config(s) | {"hidden_act": "gelu_pytorch_tanh"} | rotary_entries(s)

    def settings(self, c: Config, problems: list[str]) -> Config:
        activation_setting(c, "hidden_act", problems, ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu"))
        return super().settings(c, problems) | rotary_settings(c, problems)


class Gemma2(_AnyGemma):
    """Gemma 2."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    rank = 61
    defaults = _DEFAULTS | {
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    }  # fmt: skip
    inert = _INERT | {
        "hidden_act": "transformers reads hidden_activation in its place",
        "sliding_window_size": "transformers reads sliding_window",
    }
    load_options = {"attn_implementation": "eager"}  # because: the attention that 4.57 takes leaves the cap out
    words = {**_AnyGemma.words, "norm_order": "sandwich"}
    free = (*_AnyGemma.free, "activation", "attention_scale", "attention_cap", "logit_cap")
    names = llama_like_names({
        "attention_norm": ("input_layernorm",), "attention_out_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",), "mlp_out_norm": ("post_feedforward_layernorm",),
    })  # fmt: skip

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [*super().rules(s), *_layer_rules(s)]

    def config(self, s: GPTSettings) -> Config:
        return super().config(s) | _layer_entries(s) | {"attn_logit_softcapping": s.attention_cap} | rotary_entries(s)

    def settings(self, c: Config, problems: list[str]) -> Config:
        # because: layers 1, 3, 5, ... have a window
        layers = _layer_settings(c, problems, period=2)
        return super().settings(c, problems) | rotary_settings(c, problems) | layers | {
            "attention_cap": c["attn_logit_softcapping"]
        }  # fmt: skip


class Gemma3(_AnyGemma):
    """Gemma 3, the models of text alone and the language model of the others."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    rank = 62
    defaults = _DEFAULTS | {
        "vocab_size": 262208, "max_position_embeddings": 131072, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "layer_types": None,
        "final_logit_softcapping": None, "rope_local_base_freq": None,
    }  # fmt: skip
    inert = _INERT
    other_types = {
        "gemma3": "is a model of texts and images, of which lmtrain computes the language model alone. Save that with "
        'transformers 5, by AutoModelForImageTextToText.from_pretrained(FOLDER, dtype="auto").model.language_model'
        ".save_pretrained(NEW_FOLDER), copy the tokenizer's files to it, and import NEW_FOLDER.",
    }  # fmt: skip
    rotary_keys = (*ROTARY_KEYS, "rope_local_base_freq")
    # because: transformers 5 does not read `truncate` in a group of rope_parameters
    words = {**_AnyGemma.words, "norm_order": "sandwich", "qk_norm": "head", "rotary_rounds": True}
    free = (*_AnyGemma.free, "activation", "attention_scale", "logit_cap", "local_rotary_base")
    names = llama_like_names({
        "attention_norm": ("input_layernorm",), "attention_out_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",), "mlp_out_norm": ("post_feedforward_layernorm",),
        "attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",),
    })  # fmt: skip

    def rules(self, s: GPTSettings) -> list[Rule]:
        scales_windows = s.local_rotary_base is None and any(kind.window for kind in s.layer_kinds)
        return [
            *super().rules(s),
            *_layer_rules(s),
            (s.rotary_scaling == "none" or not scales_windows,
             f"model.rotary_scaling={s.rotary_scaling} would have to be none in layers with a window, by "
             "model.local_rotary_base"),
        ]  # fmt: skip

    def config(self, s: GPTSettings) -> Config:
        local = s.rotary_base if s.local_rotary_base is None else s.local_rotary_base
        rotary = rotary_entries(s)
        groups = {_FULL: rotary["rope_parameters"]}
        if s.window is not None:
            groups |= {_LOCAL: {"rope_type": "default", "rope_theta": local}}
            rotary["rope_local_base_freq"] = local
        rotary["rope_parameters"] = groups
        return super().config(s) | _layer_entries(s) | rotary

    def settings(self, c: Config, problems: list[str]) -> Config:
        layers = _layer_settings(c, problems, period=c["sliding_window_pattern"])
        rotary = _two_rotary_settings(c, problems)
        if layers["layer_pattern"] is None:  # because: one of the two kinds of layers is not there
            local = rotary.pop("local_rotary_base")
            rotary = rotary if layers["window"] is None else {"rotary_base": local}
        return super().settings(c, problems) | rotary | layers


def _embedding_scale(c: Config, problems: list[str]) -> float:
    """Return the factor by which Gemma multiplies embeddings: the square root of hidden_size, rounded to the dtype that
    the config.json `c` states for the stored weights. If it states no known one, append a message to `problems` and
    return 1.
    """
    dtype, width = c["dtype"] if c["dtype"] is not None else c["torch_dtype"], c["hidden_size"]
    if not isinstance(dtype, str) or dtype not in _TYPES:
        problems.append(
            f"dtype={show(dtype)} would have to be {', '.join(_TYPES)}: the type of the stored weights, to which the "
            "factor of embeddings is rounded"
        )
    elif is_number(width) and width > 0:
        return rounded(math.sqrt(width), dtype)
    return 1.0


def _layer_rules(s: GPTSettings) -> list[Rule]:
    """Return the rules that settings must meet to be a Gemma 2 or 3, besides those of all Gemmas: rotary angles in all
    layers, an attention scale of 1 / sqrt(whole number), heads that divide the width. A rule is (whether it holds, the
    message if it does not).
    """
    key = "positions" if s.layer_pattern is None else "layer_pattern"
    return [
        (all(kind.rotary for kind in s.layer_kinds),
         f"model.{key}={show(getattr(s, key))} would have to give all layers rotary angles"),
        (_query_factor(s) is not None,
         f"model.attention_scale={show(s.attention_scale)} would have to be 1 / sqrt of a whole number"),
        # because: transformers 5 refuses other numbers
        (s.width % s.num_heads == 0, f"model.num_heads={s.num_heads} would have to divide {s.width}"),
    ]  # fmt: skip


def _query_factor(s: GPTSettings) -> int | None:
    """Return the whole number n, query_pre_attn_scalar in config.json, with which the attention scale of `s` is 1 /
    sqrt(n) in fp32; None if there is none.
    """
    scale = s.head**-0.5 if s.attention_scale is None else s.attention_scale
    factor = round(scale**-2)
    same = factor > 0 and rounded(factor**-0.5, "float32") == rounded(scale, "float32")
    return factor if same else None


def _layer_entries(s: GPTSettings) -> Config:
    """Return the entries of a Gemma 2 or 3's config.json for activation, attention scale, layer types, window and logit
    cap.
    """
    return {
        "hidden_activation": _GELU_NAMES[s.activation], "query_pre_attn_scalar": _query_factor(s),
        "layer_types": layer_types(s),
        # because: transformers 4 builds the mask of a window even where no layer has one
        "sliding_window": 4096 if s.window is None else s.window, "final_logit_softcapping": s.logit_cap,
    }  # fmt: skip


def _layer_settings(c: Config, problems: list[str], *, period: Any) -> Config:
    """Return lmtrain's settings of activation, attention scale, layer pattern, window and logit cap for the config.json
    `c` of a Gemma 2 or 3. If layer_types is null, all layers have a window but the last of every `period`. Append a
    message to `problems` for each invalid entry.
    """
    num_layers, factor = c["num_hidden_layers"], c["query_pre_attn_scalar"]
    has_window = layer_kinds(c["layer_types"], num_layers, problems)
    if has_window is None and c["layer_types"] is None:
        if not isinstance(period, int) or isinstance(period, bool) or period < 1:
            problems.append(f"sliding_window_pattern={show(period)} would have to be a whole number from 1")
        else:
            has_window = all_but_each(period, num_layers)
    if not is_number(factor) or factor <= 0:
        problems.append(f"query_pre_attn_scalar={show(factor)} would have to be a number above 0")
        factor = 1
    return {
        "activation": activation_setting(c, "hidden_activation", problems), "attention_scale": factor**-0.5,
        "layer_pattern": pattern_setting(has_window or []), "logit_cap": c["final_logit_softcapping"],
        "window": c["sliding_window"] if any(has_window or []) else None,
    }  # fmt: skip


def _two_rotary_settings(c: Config, problems: list[str]) -> Config:
    """Return lmtrain's settings of rotary angles for the config.json `c` of a Gemma 3: base and scaling of the layers
    without a window, and the base of those with one. transformers 4 reads them from rope_theta, rope_local_base_freq
    and rope_scaling, and 5 from rope_parameters as well. Append a message to `problems` where the two would read other
    angles.
    """
    groups = c["rope_parameters"] or {}
    if not isinstance(groups, dict) or groups.keys() - {_FULL, _LOCAL} or not all(
        isinstance(group, dict) for group in groups.values() if group is not None
    ):  # fmt: skip
        problems.append(f"rope_parameters would have to have the groups {_FULL} and {_LOCAL}, and nothing else")
        groups = {}
    full, local, scaling = groups.get(_FULL) or {}, groups.get(_LOCAL) or {}, c["rope_scaling"] or {}
    if not isinstance(scaling, dict):
        problems.append(f"rope_scaling={show(scaling)} would have to be a group")
        scaling = {}
    if scaling and "rope_type" not in scaling:
        problems.append("rope_scaling lacks rope_type, which transformers 4 and 5 read in a Gemma 3")
    if scaling and _angles(scaling, c) != _angles({**full, **scaling}, c):
        problems.append(f"{_FULL} of rope_parameters would have to be as rope_scaling, or to have only a rope_theta")
    if local.get("rope_type", "default") != "default" or local.keys() - {"rope_type", "rope_theta"}:
        problems.append(f"{_LOCAL} of rope_parameters would have to have rope_type default and a rope_theta")
    if c["partial_rotary_factor"] not in (None, 1.0):
        problems.append(f"partial_rotary_factor={show(c['partial_rotary_factor'])} would have to be 1")
    key = "rope_scaling" if scaling else f"{_FULL} of rope_parameters"
    group = {**full, **scaling}
    check_numbers_of_group(group, group.get("rope_type"), key, c, problems)
    return {
        "rotary_base": value_of_both_forms(
            "rope_theta", c["rope_theta"], full.get("rope_theta"), f"{_FULL} of rope_parameters", 1e6, problems,
            has_old_form=bool(scaling),
        ),
        "local_rotary_base": value_of_both_forms(
            "rope_local_base_freq", c["rope_local_base_freq"], local.get("rope_theta"),
            f"{_LOCAL} of rope_parameters", 1e4, problems, has_old_form=bool(scaling),
        ),
    } | scaling_settings(group, key, c, problems)  # fmt: skip


def _angles(group: Config, c: Config) -> object:
    """Return a value by which to compare groups of rotary entries: it is equal if their scaled angles are. `group` is
    such a group and `c` the config.json around it. Return None if the group has values of wrong types.
    """
    try:
        settings = RotarySettings(**scaling_settings(group, "rope_scaling", c, []))
        return replace(settings, rotary_attention_factor=settings.angle_factor)
    except (TypeError, ValueError, OverflowError):  # because: wrong types of values are reported with all settings
        return None
