"""The options by which other tools describe a decoder and whose values are said otherwise here: Megatron-LM's.

Called by translate_foreign_flags. Options whose values stay as they are stand in config/name_suggestions.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

DECODER_SWITCHES = {
    "swiglu": "model.activation=silu model.gated=true", "squared_relu": "model.activation=relu2",
    "disable_bias_linear": "model.bias=none", "add_qkv_bias": "model.bias=all",
    "untie_embeddings_and_output_weights": "model.tied=false",
    "use_rotary_position_embeddings": "model.positions=rotary",
    "qk_layernorm": "model.qk_norm=head", "use_qk_norm": "model.qk_norm=head",
    "apply_layernorm_1p": "model.norm_weight=from_zero", "use_parallel_residual": "model.parallel_block=two_norms",
    "use_rope_scaling": "model.rotary_scaling=llama3 model.rotary_factor=8 model.rotary_original_len=8192",
}  # fmt: skip
_POSITIONS = {
    "yarn": "model.positions=rotary model.rotary_scaling=yarn", "none": "model.positions=rotary model.layer_pattern=F"
}  # fmt: skip


def decoder_overrides(name: str, values: Sequence[str]) -> str:
    """Return the overrides, with a blank between two, for an option whose value is another number or word here; empty
    for other options.
    """
    value = " ".join(values)
    if name == "position_embedding_type":
        return _POSITIONS.get(value, "")
    numbers = [int(word) for word in value.strip("()").replace(",", " ").split() if word.isdecimal()]
    number = numbers[0] if numbers else 0
    match name:
        case "window_size" if len(numbers) == 2:
            return f"model.window={number + 1}"  # because: Megatron-LM's number leaves the token itself out
        case "window_attn_skip_freq" if len(numbers) == 1 and number > 1:
            return f"model.layer_pattern={'w' * (number - 1)}f"
        case "no_rope_freq" if len(numbers) == 1 and number > 1:
            return f"model.layer_pattern={'f' * (number - 1)}F"
        case "rotary_seq_len_interpolation_factor":
            return f"model.rotary_scaling=linear model.rotary_factor={value}"
    return ""


def bias_of_switches(names: Collection[str]) -> str | None:
    """Return the value of model.bias for Megatron-LM's switches `names`, None if one of them alone says it."""
    return "qkv" if {"add_qkv_bias", "disable_bias_linear"} <= set(names) else None
