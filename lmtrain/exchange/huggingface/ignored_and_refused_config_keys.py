"""Keys of a config.json that decide no setting of lmtrain's model: they change nothing, or are refused by name.

Called by config_json, which lists the keys that decide a setting. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.exchange.huggingface.model_family_base import NOT_READ, Family

_KEPT, _OUTPUTS = "it is kept for an export", "it chooses outputs of transformers, not what is computed"
_SAME_RESULT = "it is how transformers computes, with the same result"
_GENERATION = "it is about how texts are generated"
# Keys that are in many files and change nothing that lmtrain computes.
IGNORED = {
    "model_type": _KEPT, "architectures": "the model is found by its model_type", "transformers_version": _KEPT,
    "torch_dtype": "weights become fp32, and an export has their type again",
    "dtype": "weights become fp32, and an export has their type again",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
                     "mask_token_id", "decoder_start_token_id"),
                    "the tokenizer has the ids, and an export has these again"),
    **dict.fromkeys(("use_cache", "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate",
                     "output_scores", "gradient_checkpointing"), _OUTPUTS),
    **dict.fromkeys(("task_specific_params", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
                    "it is for other tasks"),
    **dict.fromkeys(("classifier_dropout",), "it is for other heads"),
    **dict.fromkeys(("chunk_size_feed_forward", "torchscript", "attn_implementation", "use_flash_attn",
                     "use_bfloat16", "tf_legacy_loss"), _SAME_RESULT),
    **dict.fromkeys(("tokenizer_class", "prefix", "max_sequence_length", "name_or_path", "transformers.js_config",
                     "unsloth_fixed", "unsloth_version", "is_llama_config"), _KEPT),
    **dict.fromkeys(("cross_attention_hidden_size", "tie_encoder_decoder", "is_decoder", "add_cross_attention",
                     "layer_types", "use_sliding_window", "max_window_layers", "pretraining_tp"), NOT_READ),
    **dict.fromkeys(
        ("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
         "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
         "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
         "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
         "begin_suppress_tokens"), _GENERATION
    ),
    "auto_map": "transformers has models of this type itself",
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


def is_known_key(key: str, family: Family[Any]) -> bool:
    """Return whether lmtrain knows the effect of the key `key` of a config.json on models of this family: whether the
    key is read, ignored for a reason, or refused by name. Keys that begin with _ count as known.
    """
    return key.startswith("_") or any(
        key in table for table in (family.defaults, family.inert, family.aliases, IGNORED, NOT_COMPUTED)
    )


def ignored_reason(key: str, family: Family[Any]) -> str:
    """Return the reason, as a clause for a message, why lmtrain ignores the config.json key `key` in models of this
    family. Call it only for a known key that decides no setting.
    """
    if key in family.inert:
        return family.inert[key]
    return IGNORED.get(key, "it changes nothing at this value" if key in NOT_COMPUTED else _KEPT)


def uncomputed_keys(config: Mapping[str, Any], family: Family[Any]) -> dict[str, Any]:
    """Return the entries of a config.json (key -> value) that ask for something that lmtrain does not compute in models
    of this family. Entries that are null, or have a value that changes nothing, are left out.
    """
    return {
        key: config[key]
        for key, harmless in NOT_COMPUTED.items()
        if key not in family.defaults and config.get(key) is not None and config[key] not in harmless
    }


def uncomputed_problem(key: str, value: object) -> str:
    """Return the clause of a message for a key of `uncomputed_keys`."""
    harmless = (*NOT_COMPUTED[key], None)[0]
    return f"{key}={show(value)} would have to be {show(harmless)}, or be removed if it has no effect on this model"
