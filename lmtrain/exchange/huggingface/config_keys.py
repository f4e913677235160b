"""Keys of a config.json that decide no setting of lmtrain's model: they change nothing, or are refused by name.

Called by config_json, which lists the keys that decide a setting. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.config.settings_base import show

_KEPT, _OUTPUTS = "it is kept for an export", "it chooses outputs of transformers, not what is computed"
_SAME_RESULT = "it is how transformers computes, with the same result"
_NOT_READ = "transformers does not read it in a model of this type"
# Keys that are in many files and change nothing that lmtrain computes.
_IGNORED = {
    "architectures": "the model is found by its model_type", "_name_or_path": _KEPT, "transformers_version": _KEPT,
    "torch_dtype": "weights become fp32, and an export has their type again",
    "dtype": "weights become fp32, and an export has their type again",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id"),
                    "the tokenizer has the ids, and an export has these again"),
    **dict.fromkeys(("use_cache", "output_attentions", "output_hidden_states", "return_dict", "gradient_checkpointing"),
                    _OUTPUTS),
    **dict.fromkeys(("task_specific_params", "id2label", "label2id", "problem_type"), "it is for other tasks"),
    **dict.fromkeys(("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
                     "summary_first_dropout", "classifier_dropout"), "it is for other heads"),
    **dict.fromkeys(("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                     "pooler_size_per_head", "pooler_type"), _NOT_READ),
    **dict.fromkeys(("pretraining_tp", "chunk_size_feed_forward", "reorder_and_upcast_attn", "torchscript",
                     "attn_implementation", "_attn_implementation"), _SAME_RESULT),
    **dict.fromkeys(("layer_types", "use_sliding_window", "max_window_layers"), _NOT_READ),
    "n_ctx": "n_positions has its value",
    "sliding_window": "a LLaMA has no window in transformers",
    "rope_parameters": "transformers reads rope_scaling in its place",
}  # fmt: skip
# Keys with which models of other types, and changed copies of those that lmtrain reads, compute something else; each
# with the values at which it changes nothing, besides null.
# because: transformers ignores most of them in the types that lmtrain reads, and would not report that the model was
# trained as another one
NOT_COMPUTED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("embedding_multiplier", "embedding_scale", "scale_emb", "residual_multiplier", "residual_scale",
         "logits_scaling", "logit_scale", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
         "attention_out_multiplier", "attention_value_scale", "logits_mup_width_multiplier", "rope_ratio",
         "rotary_pct"), (1,)
    ),
    **dict.fromkeys(
        ("attention_multiplier", "attn_scale", "query_pre_attn_scalar", "scale_depth", "dim_model_base",
         "attn_logit_softcapping", "attention_logit_cap", "final_logit_softcapping", "logits_soft_cap",
         "output_logit_soft_cap", "clip_qkv", "attention_chunk_size", "sliding_window_pattern", "rope_local_base_freq",
         "local_rope_theta", "global_rope_theta", "rotary_emb_base", "rotary_dim", "swiglu_alpha", "swiglu_limit"), ()
    ),
    **dict.fromkeys(
        ("use_qk_norm", "qk_norm", "qk_layernorm", "qk_ln", "use_post_norm", "use_sandwich_norm",
         "use_parallel_residual", "parallel_attn", "apply_residual_connection_post_layernorm",
         "attn_temperature_tuning", "alibi", "use_alibi", "rope_interleave", "rope_interleaved", "scale_embedding",
         "rescale_embeddings", "use_mup", "mup_enabled", "disable_position_embeddings", "is_encoder_decoder"), (False,)
    ),
    **dict.fromkeys(("mlp_multipliers", "no_rope_layers"), ([],)),
    **dict.fromkeys(("pruned_heads", "per_layer_config"), ({},)),
    "no_rope_layer_interval": (0,), "rescale_every": (0,), "do_layer_norm_before": (True,),
}  # fmt: skip


def ignored_reason(key: str) -> str:
    """Return why a key that decides no setting may be left out."""
    if key in NOT_COMPUTED:
        return "it changes nothing at this value"
    return _IGNORED.get(key, "it is not known to lmtrain")


def uncomputed_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json, with their values, that change what is computed and that lmtrain lacks."""
    return {
        key: config[key]
        for key, harmless in NOT_COMPUTED.items()
        if config.get(key) is not None and config[key] not in harmless
    }


def uncomputed_problem(key: str, value: object) -> str:
    """Return the clause of a message for a key of `uncomputed_keys`."""
    harmless = (*NOT_COMPUTED[key], None)[0]
    return f"{key}={show(value)} would have to be {show(harmless)}, or be removed if it has no effect on this model"
