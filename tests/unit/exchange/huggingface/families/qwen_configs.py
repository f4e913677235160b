"""Qwens, with layers that all see everything, that all have a window, or of both kinds."""

from __future__ import annotations

from tests.unit.exchange.huggingface.families.drawing import WINDOW, Config, Draw

ACTIVATIONS = ("silu", "silu", "gelu", "gelu_pytorch_tanh", "relu2")


def late_windows(draw: Draw, num_layers: int) -> Config:
    """Return the entries by which later layers, all layers, no layers or every second layer have a window."""
    on = {"use_sliding_window": True, "sliding_window": WINDOW}
    match draw.choose("windows", ["none", "off", "late", "all", "listed"]):
        case "off":  # as in published files, which set a window and do not use it
            return {"use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 0}
        case "late":
            return on | {"max_window_layers": num_layers // 2}
        case "all":
            return on | {"max_window_layers": 0}
        case "listed":
            kinds = ["sliding_attention", "full_attention"] * num_layers
            return on | {"layer_types": kinds[:num_layers]}
    return {}


def qwen2(draw: Draw) -> Config:
    sizes, num_layers = draw.sizes(), draw.layers(2)
    return {
        **sizes, "num_hidden_layers": num_layers, "rms_norm_eps": draw.eps(),
        "hidden_act": draw.choose("activation", ACTIVATIONS), **late_windows(draw, num_layers),
        **draw.rotary(sizes["head_dim"]),
    }  # fmt: skip


CONFIGS = {"qwen2": qwen2, "qwen3": qwen2}
