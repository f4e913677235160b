"""LLaMAs and Mistrals, with each kind of rotary angles."""

from __future__ import annotations

from tests.unit.exchange.huggingface.families.drawing import WINDOW, Config, Draw


def llama(draw: Draw) -> Config:
    sizes = draw.sizes(divides=True)
    has_bias = draw.choose("bias", [False, False, True])
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "rms_norm_eps": draw.eps(), "attention_bias": has_bias,
        "mlp_bias": has_bias, **draw.rotary(sizes["head_dim"]),
    }  # fmt: skip


def mistral(draw: Draw) -> Config:
    sizes = draw.sizes()
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "rms_norm_eps": draw.eps(),
        "sliding_window": draw.choose("window", [WINDOW, None]), **draw.rotary(sizes["head_dim"]),
    }  # fmt: skip


CONFIGS = {"llama": llama, "mistral": mistral}
