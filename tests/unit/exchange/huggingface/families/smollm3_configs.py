"""SmolLM3s, some of whose layers turn no queries and keys, or have a window."""

from __future__ import annotations

from tests.unit.exchange.huggingface.families.drawing import WINDOW, Config, Draw


def smollm3(draw: Draw) -> Config:
    sizes, count = draw.sizes(), draw.layers(4)
    of_attention, of_mlp = draw.choose("bias", [(False, False), (True, True), (False, True)])
    # because: without a list the last of four layers turns nothing, and has a window if there is one
    flags = draw.choose("turns", [None, None, [1, 0] * count])
    kinds = draw.choose("kinds", [None, None, ["sliding_attention", "full_attention"] * count])
    windows: Config = draw.choose("windows", [{}, {"use_sliding_window": True, "sliding_window": WINDOW}])
    return {
        **sizes, "num_hidden_layers": count, "rms_norm_eps": draw.eps(), "attention_bias": of_attention,
        "mlp_bias": of_mlp, "no_rope_layers": flags and flags[:count], "pad_token_id": None, **windows,
        "layer_types": kinds[:count] if kinds and windows else None, **draw.rotary(sizes["head_dim"]),
    }  # fmt: skip


CONFIGS = {"smollm3": smollm3}
