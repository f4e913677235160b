"""Phi-3s, whose angles are longrope's or those of whole or partly turned heads, and Starcoder2s."""

from __future__ import annotations

from tests.unit.exchange.huggingface.families.drawing import LONGEST, ORIGINAL_LEN, WINDOW, Config, Draw

ACTIVATIONS = ("silu", "silu", "gelu", "gelu_pytorch_tanh", "relu2")


def phi3(draw: Draw) -> Config:
    is_long = draw.choose("rotary", ["default", "longrope"]) == "longrope"
    sizes = draw.sizes(own_head_width=not is_long)
    head = sizes["head_dim"] if "head_dim" in sizes else sizes["hidden_size"] // sizes["num_attention_heads"]
    share = draw.choose("share", [1.0, 0.75, 0.5]) if head % 8 == 0 else 1.0
    rotary: Config = {"rope_theta": draw.choose("base", [97.0, 500.0]), "partial_rotary_factor": share}
    if is_long:
        longrope = draw.scaling("longrope", int(head * share))["rope_scaling"]
        lists = {key: longrope[key] for key in ("short_factor", "long_factor")}
        rotary |= {"rope_scaling": {"type": "longrope", **lists}, "original_max_position_embeddings": ORIGINAL_LEN}
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "rms_norm_eps": draw.eps(),
        "hidden_act": draw.choose("activation", ACTIVATIONS), "sliding_window": draw.choose("window", [WINDOW, None]),
        "max_position_embeddings": LONGEST, "pad_token_id": None, **rotary,
    }  # fmt: skip


def starcoder2(draw: Draw) -> Config:
    sizes = draw.sizes()
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "norm_epsilon": draw.eps(),
        "use_bias": draw.choose("bias", [True, False]),
        "hidden_act": draw.choose("activation", ["gelu_pytorch_tanh", "gelu", "silu"]),
        "sliding_window": draw.choose("window", [WINDOW, None]), **draw.rotary(sizes["head_dim"]),
    }  # fmt: skip


CONFIGS = {"phi3": phi3, "starcoder2": starcoder2}
