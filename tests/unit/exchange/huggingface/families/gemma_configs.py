"""Gemmas of the three generations, and Granites."""

from __future__ import annotations

from tests.unit.exchange.huggingface.families.drawing import WINDOW, Config, Draw

# because: transformers gives the embedding of a padding token no gradient; a Gemma's factor of embeddings depends on
# the type of its weights
OF_GEMMA = {"pad_token_id": None, "dtype": "float32"}


def gemma(draw: Draw) -> Config:
    sizes = draw.sizes()
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "rms_norm_eps": draw.eps(), **draw.rotary(sizes["head_dim"]),
        **OF_GEMMA,
    }  # fmt: skip


def gemma2(draw: Draw) -> Config:
    sizes = draw.sizes(divides=True)
    return {
        **sizes, **_layers(draw, period=2), **draw.rotary(sizes["head_dim"]),
        # because: of these weights' scores and logits the usual 50 and 30 would cut nothing that is seen
        "attn_logit_softcapping": draw.choose("cap", [1.0, 2.0, None]),
        "final_logit_softcapping": draw.choose("logit cap", [1.0, 3.0, None]),
    }  # fmt: skip


def gemma3(draw: Draw) -> Config:
    sizes = draw.sizes(divides=True)
    period = draw.choose("period", [6, 3])
    layers = _layers(draw, period)
    # because: with a window in the only layer no layer reads rope_theta
    period = 1 if layers["num_hidden_layers"] == 1 else period
    rotary = draw.rotary(sizes["head_dim"])
    rotary.get("rope_scaling", {}).pop("truncate", None)  # because: transformers 5 does not read it in a group
    if original := rotary.get("original_max_position_embeddings"):
        rotary["rope_scaling"]["original_max_position_embeddings"] = original  # because: transformers 5 reads it there
    return {
        **sizes, **layers, **rotary, "sliding_window_pattern": period,
        "final_logit_softcapping": draw.choose("logit cap", [None, 3.0]),
        "rope_local_base_freq": draw.choose("local base", [60.0, 300.0]),
    }  # fmt: skip


def _layers(draw: Draw, period: int) -> Config:
    return {
        **OF_GEMMA, "num_hidden_layers": draw.layers(period), "rms_norm_eps": draw.eps(), "sliding_window": WINDOW,
        "query_pre_attn_scalar": draw.choose("scores", [5, 11, 24]),
        "hidden_activation": draw.choose("activation", ["gelu_pytorch_tanh", "gelu_pytorch_tanh", "gelu", "silu"]),
    }  # fmt: skip


def granite(draw: Draw) -> Config:
    sizes = draw.sizes()
    attention_bias, mlp_bias = draw.choose("bias", [(False, False), (True, True), (False, True)])
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "rms_norm_eps": draw.eps(), "attention_bias": attention_bias,
        "mlp_bias": mlp_bias, "embedding_multiplier": draw.choose("embedding", [3.0, 0.7]),
        "attention_multiplier": draw.choose("attention", [0.1, 0.4]),
        "logits_scaling": draw.choose("logits", [3.0, 7.0]),
        "residual_multiplier": draw.choose("residual", [0.4, 1.3]), **draw.rotary(sizes["head_dim"]),
    }  # fmt: skip


CONFIGS = {"gemma": gemma, "gemma2": gemma2, "gemma3_text": gemma3, "granite": granite}
