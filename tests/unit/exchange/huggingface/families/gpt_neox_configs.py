"""GPT-NeoXs and StableLMs, which turn a share of each head."""

from __future__ import annotations

from tests.unit.exchange.huggingface.families.drawing import ROTARY_KINDS, Config, Draw


def gpt_neox(draw: Draw) -> Config:
    sizes = draw.sizes(own_head_width=False, one_head_kind=True)
    rotary = partial_rotary(draw, sizes)
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "layer_norm_eps": draw.eps(),
        "hidden_act": draw.choose("activation", ["gelu", "gelu_new", "gelu", "relu"]),
        "use_parallel_residual": draw.choose("parallel", [True, False]),
        "attention_bias": draw.choose("bias", [True, True, False]), "rotary_emb_base": rotary.pop("rope_theta"),
        "rotary_pct": rotary.pop("partial_rotary_factor"), **rotary,
    }  # fmt: skip


def stablelm(draw: Draw) -> Config:
    sizes = draw.sizes(own_head_width=False)
    return {
        **sizes, "num_hidden_layers": draw.layers(1), "layer_norm_eps": draw.eps(),
        "use_qkv_bias": draw.choose("bias", [True, False]),
        "use_parallel_residual": draw.choose("parallel", [True, False]), **partial_rotary(draw, sizes),
    }  # fmt: skip


def partial_rotary(draw: Draw, sizes: Config) -> Config:
    head_width = sizes["hidden_size"] // sizes["num_attention_heads"]
    # because: angles come in pairs, and the first pair's does not depend on the base
    shares = [share for share in (0.25, 0.5, 0.75, 1.0) if int(head_width * share) in range(4, 17, 2)]
    share = draw.choose(f"share of {head_width}", shares)
    return draw.rotary(int(head_width * share), ROTARY_KINDS) | {"partial_rotary_factor": share}


CONFIGS = {"gpt_neox": gpt_neox, "stablelm": stablelm}
