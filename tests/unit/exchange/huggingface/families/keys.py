"""Other values for every key of transformers' config class of a family."""

from __future__ import annotations

from typing import Any

from tests.unit.exchange.huggingface.families.drawing import ORIGINAL_LEN, WINDOW, Config

# Values for keys whose default does not tell what else they may be; several are tried one by one.
_VALUES: dict[str, tuple[Any, ...]] = {
    "sliding_window": (WINDOW, 5), "head_dim": (6, 12), "num_key_value_heads": (1, 2), "hidden_act": ("relu", "gelu"),
    "hidden_activation": ("relu", "gelu"), "activation_function": ("relu", "gelu"), "num_attention_heads": (2, 1),
    "rope_theta": (300.0,),
    "rope_scaling": ({"rope_type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 2.0}),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 300.0}, {"rope_type": "dynamic", "factor": 2.0}),
    "partial_rotary_factor": (0.5,), "original_max_position_embeddings": (ORIGINAL_LEN,), "layer_types": (),
    "max_position_embeddings": (48, 96), "pad_token_id": (3,), "bos_token_id": (4,), "eos_token_id": (5, [5, 6]),
    "is_encoder_decoder": (True,), "pruned_heads": ({"0": [0]},), "torch_dtype": ("bfloat16",), "dtype": ("bfloat16",),
    "rms_norm_eps": (0.3,), "layer_norm_eps": (0.3,), "norm_eps": (0.3,), "norm_epsilon": (0.3,),
    "intermediate_size": (33,), "hidden_size": (84,), "num_hidden_layers": (1, 3), "vocab_size": (347,),
    "initializer_range": (0.5,), "chunk_size_feed_forward": (1,), "problem_type": ("regression",),
    "quantization_config": ({"quant_method": "bitsandbytes", "load_in_8bit": True},), "id2label": ({"0": "a"},),
    "label2id": ({"a": 0},), "architectures": (["Other"],), "transformers_version": ("1.0",),
}  # fmt: skip
# Keys that are about the file and not the model.
NOT_OF_THE_MODEL = {"model_type", "_name_or_path", "architectures", "transformers_version"}
# Keys that transformers has in its class, with values at which its own models fail.
NOT_TAKEN = {"return_dict", "num_return_sequences"}
# Keys that are refused by the names of our settings.
SETTINGS = {
    "hidden_size": ("width",), "num_hidden_layers": ("num_layers",), "num_attention_heads": ("num_heads",),
    "intermediate_size": ("ffn_width",), "num_key_value_heads": ("num_kv_heads",), "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("seq_len",), "head_dim": ("head_width",),
}  # fmt: skip
# The same for keys that are no sizes.
OTHER_SETTINGS = {"attn_logit_softcapping": ("attention_cap",), "final_logit_softcapping": ("logit_cap",),
                  "rotary_pct": ("rotary_share",)}  # fmt: skip


def other_values(key: str, value: Any, config: Config) -> list[Any]:
    """Return values for a key of a config.json that has `value` in transformers' class; `config` is a whole one."""
    if key == "layer_types":
        kinds = ["full_attention", "sliding_attention"] * config["num_hidden_layers"]
        return [kinds[: config["num_hidden_layers"]], kinds[1 : 1 + config["num_hidden_layers"]]]
    if key in _VALUES:
        return [other for other in _VALUES[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 1.5 + 0.25]
    if isinstance(value, str):
        return ["other"]
    if isinstance(value, list):
        return [[*value, 1] if value else [1, 0]]
    if isinstance(value, dict):
        return [{"a": 1}]
    return [2, True]
