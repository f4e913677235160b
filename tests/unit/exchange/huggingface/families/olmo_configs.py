"""OLMos of all three generations."""

from __future__ import annotations

from tests.unit.exchange.huggingface.families.drawing import WINDOW, Config, Draw


def olmo(draw: Draw) -> Config:
    return _olmo(draw) | _linear(draw)


def olmo2(draw: Draw) -> Config:
    return _olmo(draw) | {"rms_norm_eps": draw.eps()} | _linear(draw)


def olmo3(draw: Draw) -> Config:
    config = _olmo(draw)
    rotary = draw.rotary(config["head_dim"])
    if scaling := rotary.get("rope_scaling"):
        scaling.pop("truncate", None)  # because: transformers 5 does not read it in a group
        if original := rotary.get("original_max_position_embeddings"):
            scaling["original_max_position_embeddings"] = original  # because: transformers 5 reads it there
    base = {"rope_theta": rotary["rope_theta"]}
    groups = {"full_attention": rotary.get("rope_scaling", {"rope_type": "default"}) | base}
    groups["sliding_attention"] = {"rope_type": "default"} | base
    count = draw.layers(4)
    # because: without a list the last of four layers has no window
    kinds = draw.choose("kinds", [None, ["sliding_attention"] * count, ["full_attention", "sliding_attention"] * count])
    return config | {
        "num_hidden_layers": count, "rms_norm_eps": draw.eps(), "sliding_window": WINDOW,
        "layer_types": kinds and kinds[:count], **rotary, "rope_parameters": groups,
    }  # fmt: skip


def _olmo(draw: Draw) -> Config:
    # because: transformers gives the row of its padding token, 1 by default, no gradient
    return draw.sizes() | {"num_hidden_layers": draw.layers(1), "pad_token_id": None}


def _linear(draw: Draw) -> Config:
    """Return the entries for angles as transformers 4 opens them in OLMo 1 and 2: of two types, in two keys."""
    rotary = draw.rotary(0, ("default", "linear"))
    if scaling := rotary.pop("rope_scaling", None):
        rotary["rope_scaling"] = {"type": "linear", "factor": scaling["factor"]}
    return rotary


CONFIGS = {"olmo": olmo, "olmo2": olmo2, "olmo3": olmo3}
