"""Hugging Face's GPT-NeoX. Found by ../model_family_base.py.

Pythia's config.json says gelu, of which transformers computes the exact form; GPT-NeoX trained Pythia with its fused
gelu, which is the form by tanh. An import takes what transformers computes; the logits differ by some 1e-4.
"""

from __future__ import annotations

from lmtrain.exchange.huggingface.model_family_base import NOT_READ, Config, Rule
from lmtrain.exchange.huggingface.rotary_config import rotary_entries, rotary_settings
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    ACTIVATION_NAMES,
    RotaryDecoder,
    activation_setting,
    check_head_width,
    flag_setting,
    layer_rules,
    size_entries,
)
from lmtrain.exchange.huggingface.weight_names import FamilyNames, qkv_rows_by_head
from lmtrain.models.gpt_settings import GPTSettings

_SHARE = 0.25  # of a head that transformers turns if the file has no share
# Its own keys of rotary angles, and those of other families.
_ROTARY_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


class GPTNeoX(RotaryDecoder):
    """GPT-NeoX-20B and Pythia, with the exact gelu of transformers; they were trained with gelu by tanh."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    rank = 75
    defaults = {
        "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
        "num_attention_heads": 64, "head_dim": None, "hidden_act": "gelu", "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": True,
        "use_parallel_residual": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "is_causal": True,
        "rotary_emb_base": None, "rotary_pct": None, "rope_parameters": None, "rope_scaling": None,
        "original_max_position_embeddings": None,
    }  # fmt: skip
    required = {"is_causal": True}
    inert = {
        "rope_theta": "rotary_emb_base has its value", "partial_rotary_factor": "rotary_pct has its value",
        "hidden_dropout_prob": NOT_READ, "attention_probs_dropout_prob": NOT_READ,
    }  # fmt: skip
    dropouts = ("attention_dropout", "hidden_dropout")
    prefix = "gpt_neox."
    heads = ("embed_out.",)
    tied_names = ("embed_out.weight",)
    tables = (".attention.bias", ".attention.masked_bias", ".inv_freq")
    tokenizer_class = "GPTNeoXTokenizer"
    words = {"norm": "layernorm", "gated": False}
    free = ("rotary_share",)
    rotary_keys = ("rotary_emb_base", "rotary_pct", "rope_scaling", "rope_parameters",
                   "original_max_position_embeddings")  # fmt: skip
    names = FamilyNames(
        "gpt_neox.layers.",
        {
            "attention_norm": ("input_layernorm",), "attention.qkv": ("attention.query_key_value",),
            "attention.out": ("attention.dense",), "mlp_norm": ("post_attention_layernorm",),
            "mlp.up": ("mlp.dense_h_to_4h",), "mlp.down": ("mlp.dense_4h_to_h",),
        },
        {"embedding.token": ("gpt_neox.embed_in",), "norm": ("gpt_neox.final_layer_norm",), "head": ("embed_out",)},
        row_orders={"attention.qkv": qkv_rows_by_head},
    )  # fmt: skip

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [
            *self.word_rules(
                s, activation=tuple(ACTIVATION_NAMES), bias=("all", "mlp"), parallel_block=("two_norms", "no")
            ),
            *layer_rules(s),
            (s.kv_heads == s.num_heads, f"model.num_kv_heads={s.kv_heads} would have to be {s.num_heads}"),
            (s.head * s.num_heads == s.width, f"model.head_width={s.head} would have to be {s.width}/{s.num_heads}"),
        ]  # fmt: skip

    def config(self, s: GPTSettings) -> Config:
        rotary = rotary_entries(s, default_share=_SHARE)
        return size_entries(s) | {
            "hidden_act": ACTIVATION_NAMES[s.activation], "layer_norm_eps": s.norm_eps,
            "attention_bias": s.bias == "all", "use_parallel_residual": s.parallel_block == "two_norms",
            "attention_dropout": s.dropout, "hidden_dropout": s.dropout,
        } | {_ROTARY_NAMES.get(key, key): value for key, value in rotary.items()}  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        check_head_width(c, problems)
        has_bias = flag_setting(c, "attention_bias", problems)
        is_parallel = flag_setting(c, "use_parallel_residual", problems)
        rotary = {key: c[name] for key, name in _ROTARY_NAMES.items()}
        return self.common_settings(c) | rotary_settings({**c, **rotary}, problems, default_share=_SHARE) | {
            "norm_eps": c["layer_norm_eps"], "activation": activation_setting(c, "hidden_act", problems),
            "bias": "all" if has_bias else "mlp", "norm_bias": None if has_bias else True,
            "parallel_block": "two_norms" if is_parallel else "no",
        }  # fmt: skip
