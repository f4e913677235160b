"""LLaMAs and Mistrals, with each kind of rotary angles."""

from __future__ import annotations

from tests.unit.exchange.huggingface.families.drawing import WINDOW, Config, Draw


def llama(draw: Draw) -> Config:
    sizes = draw.sizes(divides=True)
    biases = draw.choose("bias", [(False, False), (False, False), (True, True), (False, True)])
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "rms_norm_eps": draw.eps(), "attention_bias": biases[0],
        "mlp_bias": biases[1], **draw.rotary(sizes["head_dim"]),
    }  # fmt: skip


def mistral(draw: Draw) -> Config:
    sizes = draw.sizes()
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "rms_norm_eps": draw.eps(),
        "sliding_window": draw.choose("window", [WINDOW, None]), **draw.rotary(sizes["head_dim"]),
    }  # fmt: skip


CONFIGS = {"llama": llama, "mistral": mistral}
