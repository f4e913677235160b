"""Decoders that have every word of GPTSettings among them, shaped as model families are: shallow and deep ones.

A word that acts only beside another one has it there. Must not import torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmtrain.models.gpt_settings import GPTSettings

# because: heads x head width, key-value heads x head width, width and feed-forward width are four numbers; the width
# leaves the last of 4 shards of a norm shorter, and 67 tokens leave padding on the last of 2 or 4 tensor-parallel ranks
_SIZE: dict[str, Any] = {
    "num_layers": 2, "width": 26, "num_heads": 8, "num_kv_heads": 4, "head_width": 8, "ffn_width": 40,
    "vocab_size": 67, "vocab_multiple": 1, "seq_len": 24, "init_std": 0.1,
}  # fmt: skip
_ROTARY: dict[str, Any] = {"positions": "rotary", "rotary_base": 100.0, "norm": "rmsnorm", "bias": "none"}
FAMILY_MODELS = {
    "qwen": GPTSettings(
        **_SIZE | _ROTARY | {"bias": "qkv", "qk_norm": "head", "activation": "silu", "gated": True},
        norm_eps=1e-3, rotary_scaling="yarn", rotary_factor=4.0, rotary_original_len=12, rotary_rounds=False,
        rotary_beta_fast=1.0, rotary_beta_slow=0.05, layer_pattern="fF",
    ),
    "neox": GPTSettings(
        **_SIZE | _ROTARY | {"norm": "layernorm", "bias": "all", "activation": "gelu"}, head_bias=True, tied=False,
        rotary_share=0.5, parallel_block="two_norms",
    ),
    "olmo": GPTSettings(
        **_SIZE | _ROTARY | {"num_kv_heads": 2, "activation": "silu", "gated": True}, tied=False, norm_order="branch",
        qk_norm="whole", window=5, layer_pattern="wf", local_rotary_base=30.0, rotary_scaling="llama3",
        rotary_factor=8.0, rotary_original_len=16, rotary_low_factor=0.5, rotary_high_factor=3.0,
    ),
    "gemma": GPTSettings(
        **_SIZE | _ROTARY | {"activation": "gelu_tanh", "gated": True}, norm_order="sandwich", norm_weight="from_zero",
        qk_norm="head", window=6, layer_pattern="wf", rotary_scaling="linear", rotary_factor=2.0,
        embedding_scale=5.0, attention_scale=0.5, attention_cap=2.0, logit_cap=3.0,
    ),
    "granite": GPTSettings(
        **_SIZE | _ROTARY | {"norm": "layernorm", "bias": "mlp", "activation": "relu2"}, norm_bias=True,
        rotary_scaling="longrope", rotary_original_len=12, rotary_attention_factor=1.2,
        rotary_short_factors=(1.0, 1.1, 1.2, 1.3), rotary_long_factors=(1.5, 2.0, 3.0, 4.0),
        residual_scale=0.5, attention_scale=0.25, embedding_scale=3.0, logit_scale=2.0, z_loss=0.01,
    ),
    "opt": GPTSettings(
        **_SIZE | {"num_kv_heads": 8, "activation": "relu"}, norm_order="post", head_bias=True, norm_bias=False,
        embedding_scale=1.5,
    ),
    "nanochat": GPTSettings(
        **_SIZE | _ROTARY | {"activation": "relu2"}, norm_weight="none", qk_norm="whole", logit_scale=1.5,
        logit_cap=4.0, parallel_block="one_norm", window=7, layer_pattern="Wf", tied=False, z_loss=0.01,
    ),
}  # fmt: skip
# because: half precision loses more of this model where its branches are smaller, and of others where they are larger
_DEEP_STDS = {"neox": 0.06}
# because: 7 layers are not as many for each of 2 or 3 stages, nor whole periods of a pattern of 2
DEEP_FAMILY_MODELS = {
    f"deep{name}": replace(
        model, num_layers=7, width=18, num_heads=4, num_kv_heads=model.kv_heads // 2, ffn_width=24,
        init_std=_DEEP_STDS.get(name, 0.05),
    )
    for name, model in FAMILY_MODELS.items()
}
