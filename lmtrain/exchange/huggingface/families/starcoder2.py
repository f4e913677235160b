"""Hugging Face's Starcoder2: layer norms, rotary angles and an MLP without gates. Found by ../model_family_base.py."""

from __future__ import annotations

from lmtrain.exchange.huggingface.model_family_base import NOT_READ, Config, Rule
from lmtrain.exchange.huggingface.rotary_config import ROTARY_DEFAULTS, rotary_entries, rotary_settings
from lmtrain.exchange.huggingface.shared_by_decoder_families import (
    ACTIVATION_NAMES,
    RotaryDecoder,
    activation_setting,
    flag_setting,
    layer_rules,
    llama_like_names,
    size_entries,
)
from lmtrain.models.gpt_settings import GPTSettings


class Starcoder2(RotaryDecoder):
    """Starcoder2, with layer norms, rotary angles and an MLP without gates."""

    model_type = "starcoder2"
    architecture = "Starcoder2ForCausalLM"
    rank = 70
    defaults = {
        "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": None, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "initializer_range": 0.018042, "use_bias": True,
        "tie_word_embeddings": True, "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0,
        "sliding_window": None, "mlp_type": "default", "norm_type": "layer_norm", "is_causal": True, **ROTARY_DEFAULTS,
    }  # fmt: skip
    required = {"mlp_type": "default", "norm_type": "layer_norm", "is_causal": True}
    inert = dict.fromkeys(
        ("activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
         "scale_attn_weights"), NOT_READ
    )  # fmt: skip
    dropouts = ("attention_dropout", "residual_dropout", "embedding_dropout")
    tokenizer_class = "GPT2Tokenizer"
    words = {"norm": "layernorm", "gated": False}
    free = ("activation",)
    names = llama_like_names({"mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",)})

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [*self.word_rules(s, bias=("all", "none")), *layer_rules(s, may_have_window=True)]

    def config(self, s: GPTSettings) -> Config:
        return size_entries(s) | {
            "num_key_value_heads": s.kv_heads, "head_dim": s.head, "hidden_act": ACTIVATION_NAMES[s.activation],
            "norm_epsilon": s.norm_eps, "use_bias": s.bias == "all", "attention_dropout": s.dropout,
            "residual_dropout": s.dropout, "embedding_dropout": s.dropout,
            "sliding_window": s.window if s.layer_kinds[0].window else None,
        } | rotary_entries(s)  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        has_bias = flag_setting(c, "use_bias", problems)
        return self.common_settings(c) | rotary_settings(c, problems) | {
            # because: without other biases its norms have one all the same
            "norm_bias": None if has_bias else True, "norm_eps": c["norm_epsilon"],
            "activation": activation_setting(c, "hidden_act", problems),
            "bias": "all" if has_bias else "none", "window": c["sliding_window"],
        }  # fmt: skip
