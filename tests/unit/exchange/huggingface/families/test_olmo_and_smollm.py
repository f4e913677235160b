"""What a config.json of an OLMo, a SmolLM3 or a GPT-NeoX means where it leaves keys out, or has them twice."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.errors import CheckpointError
from lmtrain.exchange.huggingface.config_json import hf_family, restored_config, settings_from_config
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.exchange.models import gpt2, llama

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
BOTH = {"full_attention": {"rope_theta": 7e4}, "sliding_attention": {"rope_theta": 7e4}}


def read(model_type: str, config: dict[str, Any]) -> GPTSettings:
    whole = {"model_type": model_type, "num_hidden_layers": 8, **config}
    _, settings = settings_from_config(whole, "config.json", pair_head=False)
    assert isinstance(settings, GPTSettings)
    return settings


@pytest.mark.parametrize(
    ("config", "base", "local_base", "pattern"),
    [
        ({"rope_theta": 5e5}, 5e5, None, "wwwf"),
        ({"rope_theta": 5e5, "rope_scaling": YARN}, 5e5, 5e5, "wwwf"),
        ({"rope_parameters": BOTH}, 7e4, None, "wwwf"),
        ({"rope_theta": 7e4, "rope_parameters": BOTH, "rope_scaling": YARN}, 7e4, 7e4, "wwwf"),
        ({"rope_theta": 1e4, "layer_types": ["full_attention"] * 8}, 1e4, None, None),
        ({"rope_theta": 5e5, "rope_scaling": YARN, "layer_types": ["sliding_attention"] * 8}, 5e5, None, None),
    ],
)
def test_an_olmo_3_has_the_angles_that_both_versions_give_it(
    config: dict[str, Any], base: float, local_base: float | None, pattern: str | None
) -> None:
    settings = read("olmo3", config)
    assert (settings.rotary_base, settings.local_rotary_base, settings.layer_pattern) == (base, local_base, pattern)
    assert (settings.rotary_scaling == "yarn") is ("rope_scaling" in config and settings.layer_pattern is not None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, r"rope_theta=500000\.0 and 500000\.0 and 10000\.0 would have to be the same"),
        ({"rope_theta": 1e4}, r"rope_theta=10000\.0 and 500000\.0 and 10000\.0 would have to be the same"),
        ({"rope_theta": 5e5, "rope_parameters": BOTH}, r"rope_theta=70000\.0 and 70000\.0 and 500000\.0 would"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "of the groups full_attention and sliding"),
        ({"rope_parameters": BOTH | {"sliding_attention": YARN | {"rope_theta": 7e4}}}, "sliding_attention .* default"),
        ({"rope_theta": 5e5, "sliding_window": None}, "sliding_window would have to be set"),
        ({"rope_theta": 7e4, "rope_scaling": YARN,
          "rope_parameters": BOTH | {"full_attention": YARN | {"rope_theta": 7e4, "beta_fast": 9.0}}},
         "rope_scaling would have to have all numbers that full_attention has"),
    ],
)  # fmt: skip
def test_an_olmo_3_that_the_versions_read_differently_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read("olmo3", config)


@pytest.mark.parametrize("more", [{}, {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.2079441541679836}])
def test_an_exported_olmo_3_keeps_the_scaling_it_was_published_with(more: dict[str, Any]) -> None:
    published = {"model_type": "olmo3", "num_hidden_layers": 8, "max_position_embeddings": 65536, "rope_theta": 5e5,
                 "rope_scaling": YARN | more}  # fmt: skip
    settings = read("olmo3", published)
    exported = restored_config(settings, published, {}, "bfloat16")
    assert exported["rope_scaling"] == published["rope_scaling"]
    assert exported["rope_parameters"]["full_attention"]["rope_type"] == "yarn"
    assert read("olmo3", exported) == settings


def test_an_olmo_2_has_only_angles_that_transformers_4_opens() -> None:
    settings = read("olmo2", {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (settings.rotary_scaling, settings.rotary_factor) == ("linear", 2.0)
    with pytest.raises(CheckpointError, match="type yarn would have to be default or linear"):
        read("olmo2", {"rope_parameters": YARN})


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        ({}, "fffF"), ({"no_rope_layer_interval": 2}, "fF"), ({"no_rope_layers": [0, 1] * 9}, "Ff"),
        ({"sliding_window": 9}, "fffF"), ({"use_sliding_window": True, "sliding_window": 9}, "fffW"),
        ({"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1] * 8,
          "layer_types": ["sliding_attention", "full_attention"] * 4}, "wf"),
        ({"layer_types": ["sliding_attention"] * 8, "sliding_window": 9}, "go with use_sliding_window=true"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 would have to be a whole number above 0"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers would have to be a list of 8 times 0 or 1"),
        ({"no_rope_layers": [2] * 8}, "no_rope_layers would have to be a list of 8 times 0 or 1"),
        ({"attention_bias": True}, "attention_bias=true would have to be false, or mlp_bias to be true"),
    ],
)  # fmt: skip
def test_the_layers_of_a_smollm_3(config: dict[str, Any], pattern: str) -> None:
    if " " in pattern:
        with pytest.raises(CheckpointError, match=pattern):
            read("smollm3", config)
    else:
        settings = read("smollm3", config)
        assert (settings.layer_pattern, settings.rotary_base) == (pattern, 2e6)


def test_a_gpt_neox_turns_a_quarter_of_each_head_unless_it_says_otherwise() -> None:
    settings = read("gpt_neox", {})
    assert (settings.rotary_base, settings.rotary_share, settings.parallel_block) == (1e4, 0.25, "two_norms")
    assert (settings.activation, settings.bias) == ("gelu", "all")
    settings = read("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 77, "attention_bias": False})
    assert (settings.rotary_base, settings.rotary_share) == (77, 0.5)
    assert (settings.bias, settings.has_norm_bias) == ("mlp", True)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor=0\.25 would have to be 0\.5"):
        read("gpt_neox", {"rotary_pct": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}})
    with pytest.raises(CheckpointError, match="head_dim would have to be hidden_size / num_attention_heads"):
        read("gpt_neox", {"head_dim": 7})


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        (gpt2(positions="rotary", parallel_block="two_norms", tied=False), "gpt_neox"),
        (llama(layer_pattern="fF"), "smollm3"), (llama(norm_order="branch", qk_norm="whole"), "olmo2"),
        (llama(norm="layernorm", norm_weight="none"), "olmo"),
        (llama(norm_order="branch", qk_norm="whole", window=9, layer_pattern="wf"), "olmo3"),
        (llama(norm="layernorm", norm_bias=True, rotary_share=0.5), "stablelm"),
    ],
)
def test_which_family_a_model_goes_out_as(settings: GPTSettings, family: str) -> None:
    assert hf_family(settings) == family
