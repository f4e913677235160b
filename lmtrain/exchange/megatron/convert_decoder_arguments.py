"""Convert between Megatron-LM's arguments and the words of a decoder: rotary angles, layers that differ, norms.
Torch-free.

Called by convert_arguments_and_settings.py, which has the sizes and everything that a BERT has, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.exchange.settings_rules_for_all_formats import shortest_pattern, word_rules
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings

GetArgument = Callable[..., Any]  # (name, default=None) -> the value of Megatron-LM's argument
# The numbers of --use-rope-scaling that no argument of Megatron-LM changes.
_LLAMA3_NUMBERS: dict[str, Any] = {
    "rotary_original_len": 8192, "rotary_low_factor": 1.0, "rotary_high_factor": 4.0
}  # fmt: skip
# Words that Megatron-LM has, or that a rule is about.
_WORDS = (
    "positions", "norm", "activation", "gated", "bias", "tied", "parallel_block", "window", "rotary_base",
    "norm_bias", "norm_weight", "qk_norm", "rotary_share", "rotary_scaling", "rotary_factor", "layer_pattern",
    *_LLAMA3_NUMBERS,
)  # fmt: skip
# Arguments that Megatron-LM does not take from a checkpoint.
_SWITCHES_TO_REPEAT = ("apply_layernorm_1p", "qk_layernorm", "use_rope_scaling")
_VALUES_TO_REPEAT = (
    "rope_scaling_factor", "rotary_seq_len_interpolation_factor", "no_rope_freq", "window_size",
    "window_attn_skip_freq",
)  # fmt: skip


def words_from_arguments(
    argument: GetArgument, num_layers: int, problems: list[str], *, positions: str, norm: str
) -> dict[str, Any]:
    """Return lmtrain's settings (key -> value) of a decoder's window, layer pattern, norms and rotary angles for
    Megatron-LM's arguments; settings of norms that keep their default are left out. `argument` reads an argument by its
    name; `positions` is the value of --position-embedding-type, and `norm` is layernorm or rmsnorm. Append a message to
    `problems` for each argument that lmtrain has no setting for.
    """
    values = _layers_from_arguments(argument, num_layers, problems, positions)
    if argument("apply_layernorm_1p", False) or argument("layernorm_zero_centered_gamma", False):
        values["norm_weight"] = "from_zero"
    if argument("qk_layernorm", False):
        values["qk_norm"] = "head"
        if norm == "layernorm":
            problems.append("--qk-layernorm true would have to be false, or to go with --normalization RMSNorm")
    return values | (_angles_from_arguments(argument, problems) if positions == "rope" else {})


def _angles_from_arguments(argument: GetArgument, problems: list[str]) -> dict[str, Any]:
    """Return lmtrain's settings of rotary angles, key -> value, for Megatron-LM's arguments, of which `argument` reads
    one by its name. Append a message to `problems` if two ways of scaling are asked for at once.
    """
    values = {"rotary_base": argument("rotary_base", 10000), "rotary_share": argument("rotary_percent", 1.0)}
    factor = argument("rotary_seq_len_interpolation_factor")
    divides = factor not in (None, 1)
    if argument("use_rope_scaling", False):
        if divides:
            problems.append(
                f"--rotary-seq-len-interpolation-factor {show(factor)} would have to be 1 beside --use-rope-scaling"
            )
        scaling = {"rotary_scaling": "llama3", "rotary_factor": argument("rope_scaling_factor", 8.0)}
        return values | scaling | _LLAMA3_NUMBERS
    return values | ({"rotary_scaling": "linear", "rotary_factor": factor} if divides else {})


def _layers_from_arguments(
    argument: GetArgument, num_layers: int, problems: list[str], positions: str
) -> dict[str, Any]:
    """Return lmtrain's settings {window, layer_pattern}, each of which may be None, for Megatron-LM's arguments about
    windows and about layers without rotary angles. `positions` is the value of --position-embedding-type. Append a
    message to `problems` for an invalid argument.
    """
    window, no_layers = argument("window_size"), (False,) * num_layers
    is_pair = isinstance(window, tuple) and len(window) == 2 and all(type(n) is int for n in window)
    if window is not None and not (is_pair and window[1] in (0, -1)):
        problems.append("--window-size would have to be (tokens back, 0)")
        window = None
    windows, without_angles = no_layers, no_layers
    if window is not None and window[0] >= 0:
        windows = _flags_of_layers(argument, "window_attn_skip_freq", num_layers, problems, last=False)
    if positions == "rope":
        without_angles = _flags_of_layers(argument, "no_rope_freq", num_layers, problems, last=True)
    elif positions == "none":
        without_angles = (True,) * num_layers
    # because: layers without angles are a word of rotary positions only; learned ones have none anyway
    is_learned = positions == "learned_absolute"
    letters = ["w" if is_local else "f" for is_local in windows]
    letters = [x.upper() if off or is_learned else x for x, off in zip(letters, without_angles, strict=True)]
    pattern, usual = shortest_pattern("".join(letters)), "WF" if is_learned else "wf"
    return {
        "window": window[0] + 1 if window is not None and any(windows) else None,
        "layer_pattern": None if pattern in tuple(usual) else pattern,
    }


def _flags_of_layers(
    argument: GetArgument, name: str, num_layers: int, problems: list[str], *, last: bool
) -> tuple[bool, ...]:
    """Return a flag for each layer from the argument `name`. A list of 0 and 1 has the flags themselves. A number n
    gives every n-th layer the flag `last`, and all others the opposite. Without the argument, or with 0, all layers
    have the opposite of `last`. The same holds for an invalid value, for which a message is appended to `problems`.
    """
    value = argument(name)
    if value in (None, 0):
        return (not last,) * num_layers
    if type(value) is int and value > 0:
        return tuple(((layer + 1) % value == 0) is last for layer in range(num_layers))
    if isinstance(value, tuple) and len(value) == num_layers and all(flag in (0, 1) for flag in value):
        return tuple(bool(flag) for flag in value)
    problems.append(
        f"--{name.replace('_', '-')} would have to be a whole number above 0, or a list of {num_layers} times 0 or 1"
    )
    return (not last,) * num_layers


def decoder_arguments(s: GPTSettings) -> dict[str, Any]:
    """Return Megatron-LM's arguments, name -> value, for the settings of a decoder other than its sizes: positions,
    windows, biases, activation and norms. `decoder_rules` must hold for the settings.
    """
    kinds, from_zero = s.layer_kinds, s.norm_weight == "from_zero"
    windows = [int(kind.window) for kind in kinds]
    without_angles = [int(not kind.rotary) for kind in kinds]
    turns = s.positions == "rotary" and not all(without_angles)
    has_angles = {"rope": turns, "none": s.positions == "rotary" and not turns}
    positions = next((kind for kind, holds in has_angles.items() if holds), "learned_absolute")
    return {
        "position_embedding_type": positions, "add_position_embedding": not turns,
        "use_rotary_position_embeddings": turns, "rotary_base": int(s.rotary_base), "rotary_percent": s.rotary_share,
        "rotary_seq_len_interpolation_factor": int(s.rotary_factor) if s.rotary_scaling == "linear" else None,
        "use_rope_scaling": s.rotary_scaling == "llama3",
        "rope_scaling_factor": s.rotary_factor if s.rotary_scaling == "llama3" else 8.0,
        "no_rope_freq": without_angles if turns and any(without_angles) else None,
        "window_size": None if s.window is None else (s.window - 1, 0),
        "window_attn_skip_freq": windows if any(windows) and not all(windows) else None,
        "add_bias_linear": s.bias == "all", "add_qkv_bias": s.bias in ("all", "qkv"),
        "squared_relu": s.activation == "relu2", "swiglu": s.gated,
        "normalization": "RMSNorm" if s.norm == "rmsnorm" else "LayerNorm", "apply_layernorm_1p": from_zero,
        "layernorm_zero_centered_gamma": from_zero, "qk_layernorm": s.qk_norm == "head",
    }  # fmt: skip


def decoder_rules(s: GPTSettings) -> list[tuple[bool, str]]:
    """Return the conditions that a decoder's settings must meet so that Megatron-LM computes the same model, each as
    (whether it is met, the message if it is not).
    """
    linear, llama3 = s.rotary_scaling == "linear", s.rotary_scaling == "llama3"
    ungated = ("gelu", "gelu_tanh", "relu2")
    return [
        (s.parallel_block == "no", f"model.parallel_block={s.parallel_block} would have to be no"),
        (s.bias in ("all", "none", "qkv"), f"model.bias={s.bias} would have to be all, none or qkv"),
        (s.activation == "silu" if s.gated else s.activation in ungated,
         f"model.activation={s.activation}, model.gated={show(s.gated)} would have to be gelu, gelu_tanh or relu2 "
         "without gates, or silu with them"),
        (s.bias == "all" or s.activation != "gelu_tanh",
         f"model.bias={s.bias} would have to be all, or model.activation gelu, relu2, or silu with gates"),
        (s.rotary_base == int(s.rotary_base), f"model.rotary_base={s.rotary_base} would have to be a whole number"),
        (s.norm == "rmsnorm" or s.has_norm_bias,
         "model.norm_bias=false would have to be true, as its LayerNorm has a bias"),
        (s.norm_weight != "none", "model.norm_weight=none would have to be ones or from_zero"),
        (s.qk_norm == "none" or (s.qk_norm == "head" and s.norm == "rmsnorm"),
         f"model.qk_norm={s.qk_norm} would have to be none, or head with model.norm=rmsnorm"),
        (s.rotary_scaling in ("none", "linear", "llama3"),
         f"model.rotary_scaling={s.rotary_scaling} would have to be none, linear or llama3"),
        (not linear or s.rotary_factor == int(s.rotary_factor),
         f"model.rotary_factor={s.rotary_factor:g} would have to be a whole number"),
        *((not llama3 or getattr(s, key) == value,
           f"model.{key}={show(getattr(s, key))} would have to be {show(value)}")
          for key, value in _LLAMA3_NUMBERS.items()),
        *word_rules(s, _WORDS),
    ]  # fmt: skip


def flags_to_repeat(settings: ModelSettings) -> str:
    """Return the command-line flags, joined by blanks, that a user must give Megatron-LM together with
    --use-checkpoint-args to load an exported model, because it does not read these arguments from a checkpoint. Return
    an empty text if none are needed.
    """
    assert isinstance(settings, (GPTSettings, BertSettings))
    is_decoder = isinstance(settings, GPTSettings)
    arguments = decoder_arguments(settings) if isinstance(settings, GPTSettings) else {}
    has_bias = not is_decoder or arguments["add_bias_linear"]
    flags = ["--norm-epsilon", f"{settings.norm_eps:g}"] if settings.norm_eps != 1e-5 else []
    flags += ["--no-bias-gelu-fusion"] if has_bias and settings.activation == "gelu" else []
    flags += [f"--{name.replace('_', '-')}" for name in _SWITCHES_TO_REPEAT if arguments.get(name)]
    values = {name: arguments.get(name) for name in _VALUES_TO_REPEAT}
    if not arguments.get("use_rope_scaling"):
        values.pop("rope_scaling_factor")
    for name, value in values.items():
        # because: Megatron-LM reads the brackets and splits at the commas, and a shell splits at blanks
        flags += [f"--{name.replace('_', '-')}", f"'{value}'".replace(" ", "")] if value is not None else []
    return " ".join(flags)
