"""What the families of decoders share: rules about our settings, names of activations, kinds of layers.

Torch-free; called by the families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from lmtrain.config.settings_base import show
from lmtrain.errors import shorten
from lmtrain.exchange.huggingface.model_family_base import Config, Family, Rule
from lmtrain.exchange.huggingface.rotary_config import ROTARY_KEYS, ROTARY_WORDS
from lmtrain.exchange.huggingface.weight_names import FamilyNames
from lmtrain.exchange.settings_rules_for_all_formats import shortest_pattern, word_rules
from lmtrain.models.gpt_settings import LAYER_LETTERS, GPTSettings
from lmtrain.models.model_settings import MAX_LAYERS
from lmtrain.spec import LayerKind

WINDOW_LAYER, FULL_LAYER = "sliding_attention", "full_attention"  # transformers' names of kinds of layers
# (attention_bias, mlp_bias) by our word for biases; the first is for attention's output, too.
BIASES = {"none": (False, False), "all": (True, True), "mlp": (False, True)}
# because: attention_dropout would drop attention alone, which is not how a model of ours was trained
NO_DROPOUT = {"attention_dropout": 0.0}
# Our activations by each of transformers' names, first the one that is written.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
ACTIVATION_NAMES = {ours: next(name for name, word in ACTIVATIONS.items() if word == ours)
                    for ours in ACTIVATIONS.values()}  # fmt: skip


def layer_rules(s: GPTSettings, *, may_have_window: bool = False) -> list[Rule]:
    """Return a list of one rule, (whether it holds, the message if it does not): all layers of `s` are of the same
    kind, with rotary angles and without a window. If `may_have_window`, all may also have a window.
    """
    kinds = set(s.layer_kinds)
    allowed = [LayerKind(window=window, rotary=True) for window in ((False, True) if may_have_window else (False,))]
    texts = [f"layers {'with' if kind.window else 'without'} a window and with rotary angles" for kind in allowed]
    key = "window" if s.layer_pattern is None else "layer_pattern"
    message = f"model.{key}={show(getattr(s, key))} would have to give {' or '.join(texts)}, the same for all"
    return [(len(kinds) == 1 and kinds <= set(allowed), message)]


def activation_setting(c: Config, key: str, problems: list[str], allowed: Sequence[str] = tuple(ACTIVATIONS)) -> str:
    """Return lmtrain's name for the activation at `key` of the config.json `c`, "gelu" if it is unknown. Append a
    message to `problems` if it is none of `allowed`, which are transformers' names.
    """
    word = str(c[key])
    if word not in allowed:
        problems.append(f"{key}={shorten(word)} would have to be {', '.join(allowed)}")
    return ACTIVATIONS.get(word, "gelu")


def flag_setting(c: Config, key: str, problems: list[str]) -> bool:
    """Return the value at `key` of the config.json `c` as a bool. Append a message to `problems` if it is neither true
    nor false.
    """
    if not isinstance(c[key], bool):
        problems.append(f"{key}={shorten(show(c[key]))} would have to be true or false")
    return bool(c[key])


def layer_types(s: GPTSettings) -> list[str]:
    """Return transformers' layer_types: the kind of each layer, whether its attention has a window."""
    return [WINDOW_LAYER if kind.window else FULL_LAYER for kind in s.layer_kinds]


def layer_kinds(types: object, num_layers: object, problems: list[str]) -> list[bool] | None:
    """Return for each layer whether its attention has a window. `types` is layer_types of a config.json; return None if
    it is null or invalid. Append a message to `problems` if it is invalid: not a list with "sliding_attention" or
    "full_attention" for each of `num_layers` layers.
    """
    if types is None:
        return None
    if not isinstance(types, list) or any(kind not in (WINDOW_LAYER, FULL_LAYER) for kind in types):
        problems.append(f"layer_types would have to be a list of {WINDOW_LAYER} and {FULL_LAYER}")
        return None
    if len(types) != num_layers:
        problems.append(f"layer_types has {len(types)} layers, and num_hidden_layers={show(num_layers)}")
        return None
    return [kind == WINDOW_LAYER for kind in types]


def pattern_setting(has_window: Sequence[bool], has_rotary: Sequence[bool] | None = None) -> str | None:
    """Return the setting layer_pattern of a model whose layers have a window and rotary angles as the two lists say
    (None: all have angles): the shortest row of letters, one a layer, that yields all layers when it is repeated.
    Return None if there are no layers, or all are alike and have angles.
    """
    rotary = [True] * len(has_window) if has_rotary is None else has_rotary
    letters = {kind: letter for letter, kind in LAYER_LETTERS.items()}
    layers = zip(has_window, rotary, strict=True)
    text = "".join(letters[LayerKind(window=window, rotary=turns)] for window, turns in layers)
    return None if set(text) in ({"w"}, {"f"}, set()) else shortest_pattern(text)


def all_but_each(period: int, num_layers: object) -> list[bool]:
    """Return a flag for each of `num_layers` layers: False for the last of every `period` layers, True for the others.
    Return [] if `num_layers`, which comes from a config.json, is no integer; the list is cut after MAX_LAYERS + 1.
    """
    count = num_layers if isinstance(num_layers, int) else 0
    # because: a damaged file may ask for so many layers that their list fills the memory; settings refuse that many
    return [(layer + 1) % period != 0 for layer in range(min(count, MAX_LAYERS + 1))]


def bias_setting(c: Config) -> str | None:
    """Return our word for the biases of a LLaMA's linears, None if lmtrain has no word for them."""
    biases = (c["attention_bias"], c["mlp_bias"])
    return next((word for word, values in BIASES.items() if values == biases), None)


def late_window_settings(c: Config, problems: list[str]) -> Config:
    """Return lmtrain's settings {window, layer_pattern} for the config.json `c` of a Qwen. The layers that have a
    window are those in layer_types or, if that is null, all from layer max_window_layers on. Append a message to
    `problems` for entries that are invalid or contradict each other; then {} may be returned.
    """
    num_layers, first = c["num_hidden_layers"], c["max_window_layers"]
    window = c["sliding_window"] if flag_setting(c, "use_sliding_window", problems) else None
    has_window = layer_kinds(c["layer_types"], num_layers, problems)
    if has_window is None:
        if window is None:
            return {"window": None, "layer_pattern": None}
        if not all(type(size) is int and 0 <= size <= MAX_LAYERS for size in (num_layers, first)):
            problems.append(
                f"num_hidden_layers={show(num_layers)} and max_window_layers={show(first)} would have to be numbers of "
                "layers"
            )
            return {}
        has_window = [layer >= first for layer in range(num_layers)]
    elif any(has_window) and window is None:
        problems.append(
            f"layer_types has {WINDOW_LAYER}, for which sliding_window would have to be set and use_sliding_window true"
        )
    return {"window": window if any(has_window) else None, "layer_pattern": pattern_setting(has_window)}


def late_window_entries(s: GPTSettings) -> Config:
    """Return the entries of a Qwen's config.json that say which layers have a sliding window, and how long it is."""
    has_window = [kind.window for kind in s.layer_kinds]
    return {
        "use_sliding_window": any(has_window), "sliding_window": s.window if any(has_window) else None,
        # because: versions of transformers before layer_types read this alone
        "max_window_layers": has_window.index(True) if any(has_window) else s.num_layers, "layer_types": layer_types(s),
    }  # fmt: skip


def rotary_layer_rules(s: GPTSettings) -> list[Rule]:
    """Return the rule that every layer turns queries and keys, with or without a window."""
    message = f"model.layer_pattern={show(s.layer_pattern)} would have to be of w and f, layers with rotary angles"
    return [(all(kind.rotary for kind in s.layer_kinds), message)]


def check_head_width(c: Config, problems: list[str]) -> None:
    """Append a message to `problems` if head_dim of the config.json `c` is set and is not hidden_size /
    num_attention_heads.
    """
    is_usual = type(c["head_dim"]) is int and c["head_dim"] * c["num_attention_heads"] == c["hidden_size"]
    if c["head_dim"] is not None and not is_usual:
        problems.append("head_dim would have to be hidden_size / num_attention_heads, or be removed")


def llama_like_names(parts: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> FamilyNames:
    """Return the names of the weights of a Hugging Face family that names most of them as LLaMA does. `parts` has the
    names that it adds or replaces: lmtrain's name of a part of a block -> the names of the tensors that hold it.
    """
    blocks = {
        "attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",), "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }  # fmt: skip
    others = {"embedding.token": ("model.embed_tokens",), "norm": ("model.norm",), "head": ("lm_head",)}
    return FamilyNames("model.layers.", {**blocks, **parts}, others)


def size_entries(s: GPTSettings) -> Config:
    """Return the entries of config.json for a decoder's sizes, init std and tied embeddings, under LLaMA's keys."""
    return {
        "vocab_size": s.vocab_size, "hidden_size": s.width, "intermediate_size": s.ffn,
        "num_hidden_layers": s.num_layers, "num_attention_heads": s.num_heads, "max_position_embeddings": s.seq_len,
        "initializer_range": s.init_std, "tie_word_embeddings": s.tied,
    }  # fmt: skip


class RotaryDecoder(Family[GPTSettings]):
    """A family of decoders with rotary angles and most of LLaMA's keys and names, unless it states others."""

    settings_class = GPTSettings
    dropouts: ClassVar[tuple[str, ...]] = ("attention_dropout",)
    rotary_keys: ClassVar[tuple[str, ...]] = ROTARY_KEYS
    names = llama_like_names()
    words: ClassVar[Mapping[str, Any]]  # our settings that all models of the family have
    free: ClassVar[tuple[str, ...]] = ()  # our settings that its keys decide, besides those of most families

    def word_rules(self, s: GPTSettings, **choices: object) -> list[Rule]:
        """Return the rules about our settings: each of `words` has its value, and each of `choices` one of several."""
        free = {"tied", "window", "layer_pattern", *ROTARY_WORDS, *self.free} - self.words.keys()
        return word_rules(s, free, positions="rotary", **self.words, **choices)

    def common_settings(self, c: Config) -> Config:
        """Return lmtrain's settings for the keys of the config.json `c` that these families read alike, such as sizes,
        together with `words`, the settings that are the same in all models of this family.
        """
        return {
            "kind": "gpt", "num_layers": c["num_hidden_layers"], "width": c["hidden_size"],
            "num_heads": c["num_attention_heads"], "num_kv_heads": c.get("num_key_value_heads"),
            "head_width": c["head_dim"], "ffn_width": c["intermediate_size"], "vocab_size": c["vocab_size"],
            "seq_len": c["max_position_embeddings"], "init_std": c["initializer_range"],
            "tied": c["tie_word_embeddings"], "positions": "rotary", **self.words,
        }  # fmt: skip
