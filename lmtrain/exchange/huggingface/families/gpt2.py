"""Hugging Face's GPT-2. Found by ../model_family_base.py."""

from __future__ import annotations

from lmtrain.exchange.huggingface.model_family_base import Config, Family, Rule
from lmtrain.exchange.huggingface.shared_by_decoder_families import ACTIVATION_NAMES, GELUS, activation_setting
from lmtrain.exchange.huggingface.weight_names import FamilyNames
from lmtrain.exchange.settings_rules_for_all_formats import word_rules
from lmtrain.models.gpt_settings import GPTSettings


class GPT2(Family[GPTSettings]):
    """GPT-2."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    settings_class = GPTSettings
    rank = 10
    defaults = {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "resid_pdrop": 0.1,
        "embd_pdrop": 0.1, "attn_pdrop": 0.1, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False, "tie_word_embeddings": True, "is_causal": True,
    }  # fmt: skip
    required = {
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
        "is_causal": True,
    }  # fmt: skip
    inert = {
        "n_ctx": "n_positions has its value", "intermediate_size": "transformers reads n_inner",
        "reorder_and_upcast_attn": "it is how transformers rounds, not what it computes",
        **dict.fromkeys(("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
                         "summary_first_dropout", "predict_special_tokens"), "it is for other heads"),
        "n_special": "vocab_size counts all tokens",
    }  # fmt: skip
    aliases = {
        "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }  # fmt: skip
    dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    longest = "n_positions"
    prefix = "transformer."
    tables = (".attn.bias", ".attn.masked_bias")
    tokenizer_class = "GPT2Tokenizer"
    names = FamilyNames(
        "transformer.h.",
        {
            "attention_norm": ("ln_1",), "attention.qkv": ("attn.c_attn",), "attention.out": ("attn.c_proj",),
            "mlp_norm": ("ln_2",), "mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",),
        },
        {
            "embedding.token": ("transformer.wte",), "embedding.position": ("transformer.wpe",),
            "norm": ("transformer.ln_f",), "head": ("lm_head",),
        },
        ("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
    )  # fmt: skip

    def rules(self, s: GPTSettings) -> list[Rule]:
        return [
            *word_rules(s, free=("tied",), activation=("gelu_tanh", "gelu")),
            (s.kv_heads == s.num_heads, f"model.num_kv_heads={s.kv_heads} would have to be {s.num_heads}"),
            (s.head * s.num_heads == s.width, f"model.head_width={s.head} would have to be {s.width}/{s.num_heads}"),
        ]

    def config(self, s: GPTSettings) -> Config:
        return {
            "vocab_size": s.vocab_size, "n_positions": s.position_rows, "n_embd": s.width, "n_layer": s.num_layers,
            "n_head": s.num_heads, "n_inner": s.ffn, "activation_function": ACTIVATION_NAMES[s.activation],
            "layer_norm_epsilon": s.norm_eps, "initializer_range": s.init_std, "resid_pdrop": s.dropout,
            "embd_pdrop": s.dropout, "attn_pdrop": s.dropout, "tie_word_embeddings": s.tied,
        }  # fmt: skip

    def settings(self, c: Config, problems: list[str]) -> Config:
        return {
            "kind": "gpt", "num_layers": c["n_layer"], "width": c["n_embd"], "num_heads": c["n_head"],
            "ffn_width": c["n_inner"], "vocab_size": c["vocab_size"], "seq_len": c["n_positions"],
            "positions": "learned", "norm": "layernorm", "norm_eps": c["layer_norm_epsilon"],
            "activation": activation_setting(c, "activation_function", problems, GELUS), "bias": "all",
            "tied": c["tie_word_embeddings"], "init_std": c["initializer_range"],
        }  # fmt: skip
