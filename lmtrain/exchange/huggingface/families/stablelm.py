"""Hugging Face's StableLM: a LLaMA with LayerNorms that turns a share of each head.

Found by ../model_family_base.py.
"""

from __future__ import annotations

from lmtrain.exchange.huggingface.model_family_base import Config, Rule
from lmtrain.exchange.huggingface.rotary_config import ROTARY_DEFAULTS, ROTARY_KEYS, rotary_entries, rotary_settings
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    RotaryDecoder,
    check_head_width,
    flag_setting,
    layer_rules,
    size_entries,
)
from lmtrain.models.gpt_settings import GPTSettings

_SHARE = 0.25  # of a head that transformers turns if the file has no share


class StableLM(RotaryDecoder):
    """StableLM 3B and StableLM 2 1.6B, and others without norms of queries and keys."""

    model_type = "stablelm"
    architecture = "StableLmForCausalLM"
    rank = 85
    defaults = {
        "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "initializer_range": 0.02,
        "tie_word_embeddings": False, "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "is_causal": True, **ROTARY_DEFAULTS,
    }  # fmt: skip
    # because: its hidden_dropout is that of the MLP alone, and a norm of queries has other weights for each head
    required = {"hidden_act": "silu", "is_causal": True, "qk_layernorm": False, "hidden_dropout": 0}
    tokenizer_class = "GPTNeoXTokenizer"
    words = {"norm": "layernorm", "activation": "silu", "gated": True}
    free = ("rotary_share",)
    rotary_keys = (*ROTARY_KEYS, "partial_rotary_factor")

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [
            *self.word_rules(s, bias=("none", "qkv"), parallel_block=("no", "one_norm")),
            *layer_rules(s),
            (s.head * s.num_heads == s.width, f"model.head_width={s.head} would have to be {s.width}/{s.num_heads}"),
        ]  # fmt: skip

    def config(self, s: GPTSettings) -> Config:
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "hidden_act": "silu", "layer_norm_eps": s.norm_eps,
            "use_qkv_bias": s.bias == "qkv", "use_parallel_residual": s.parallel_block == "one_norm",
            # because: theirs would drop less than this model was trained with
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        } | rotary_entries(s, default_share=_SHARE)  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        check_head_width(c, problems)
        has_bias = flag_setting(c, "use_qkv_bias", problems)
        is_parallel = flag_setting(c, "use_parallel_residual", problems)
        return self.common_settings(c) | rotary_settings(c, problems, default_share=_SHARE) | {
            "norm_eps": c["layer_norm_eps"], "norm_bias": True,
            "bias": "qkv" if has_bias else "none", "parallel_block": "one_norm" if is_parallel else "no",
        }  # fmt: skip
