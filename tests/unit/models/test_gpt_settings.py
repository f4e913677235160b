"""GPT settings: what follows from what, and that every wrong value is refused with a way out."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import SettingsError, Way, split_ways
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from tests.layouts.family_models import DEEP_FAMILY_MODELS, FAMILY_MODELS

ROTARY: dict[str, Any] = {"positions": "rotary"}
LONGROPE: dict[str, Any] = {
    "rotary_scaling": "longrope", "rotary_original_len": 8, "rotary_attention_factor": 1.5,
    "rotary_short_factors": (1.0,) * 8, "rotary_long_factors": (2.0,) * 8,
}  # fmt: skip


def made(data: dict[str, Any]) -> ModelSettings:
    return build_settings(ModelSettings, data, "model")  # type: ignore[type-abstract]


def tiny(**changes: Any) -> GPTSettings:
    values: dict[str, Any] = {"num_layers": 2, "width": 64, "num_heads": 4, "seq_len": 16}
    return GPTSettings(**(values | changes))


def test_what_follows_when_nothing_is_said() -> None:
    shape = tiny().shape
    assert (shape.num_kv_heads, shape.head_width, shape.ffn_width, shape.gated) == (4, 16, 256, False)
    assert tiny(width=4096, num_heads=32, activation="silu", gated=True).shape.ffn_width == 11008  # LLaMA 7B's
    assert tiny(ffn_width=100, activation="silu", gated=True).shape.ffn_width == 100
    assert tiny(head_width=5).shape.head_width == 5
    assert tiny(num_kv_heads=1, window=3).shape.num_kv_heads == 1
    assert tiny(window=3).shape.window == 3


def test_vocabulary_comes_from_the_tokenizer() -> None:
    assert tiny().vocab_size is None
    assert tiny().shape.vocab_size == 0
    settings = tiny().with_vocab(50257)
    assert (settings.shape.vocab_size, settings.padded_vocab_size) == (50257, 50304)
    assert tiny(vocab_size=50264).with_vocab(50257).shape.vocab_size == 50264
    with pytest.raises(SettingsError, match=r"model\.vocab_size=50000 is smaller than the tokenizer's 50257 tokens"):
        tiny(vocab_size=50000).with_vocab(50257)
    assert tiny(vocab_size=256).padded_vocab_size == 256
    assert tiny(vocab_size=257, vocab_multiple=1).padded_vocab_size == 257


def test_dropout_decides_whether_steps_are_random() -> None:
    assert not tiny().uses_dropout
    assert tiny(dropout=0.1).uses_dropout


BRANCH_BIASES = {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}
NORM_BIASES = {"attention_norm", "mlp_norm", "norm"}


@pytest.mark.parametrize(
    ("changes", "biases"),
    [
        ({}, BRANCH_BIASES | NORM_BIASES),
        ({"bias": "none"}, set()),
        ({"bias": "qkv"}, {"attention.qkv"}),
        ({"bias": "mlp", "head_bias": True}, {"mlp.up", "mlp.down", "head"}),
        ({"norm_bias": False}, BRANCH_BIASES),
        ({"bias": "none", "norm_bias": True}, NORM_BIASES),
        ({"norm": "rmsnorm"}, BRANCH_BIASES),
    ],
)
def test_biases_are_where_the_words_say(changes: dict[str, Any], biases: set[str]) -> None:
    settings = tiny(num_layers=1, vocab_size=8, **changes)
    names = {name for name in settings.weights() if name.endswith(".bias")}
    assert {name.removesuffix(".bias").removeprefix("blocks.0.") for name in names} == biases


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 3}, ["num_heads=3 does not divide width=64", "1, 2, 4, 8, 16, 32 or 64"]),
        ({"num_heads": 128}, ["num_heads=128"]),
        ({"num_heads": 0}, ["num_heads=0 must be at least 1"]),
        ({"num_kv_heads": 3}, ["num_kv_heads=3 does not divide num_heads=4", "1, 2 or 4"]),
        ({"num_kv_heads": 8}, ["num_kv_heads=8 does not divide"]),
        ({"head_width": 7, "positions": "rotary"}, ["head_width=7 x rotary_share=1 is 7 numbers", "another width"]),
        ({"window": 0}, ["window=0 must be at least 1", "null"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
        ({"dropout": -0.1}, ["dropout=-0.1"]),
        ({"width": 0}, ["width=0"]),
        ({"seq_len": 0}, ["seq_len=0"]),
        ({"num_positions": 15}, ["num_positions=15 has fewer rows than", "seq_len=16. Use 16 or more, or null"]),
        ({"num_positions": 0}, ["num_positions=0 must be at least 1"]),
        ({"vocab_size": 0}, ["vocab_size=0"]),
        ({"vocab_multiple": 0}, ["vocab_multiple=0"]),
        ({"vocab_multiple": 65_537}, ["vocab_multiple=65537 must be at most 65536"]),
        ({"norm_eps": 0.0}, ["norm_eps=0.0 must be above 0"]),
        ({"init_std": float("nan")}, ["init_std=nan"]),
        ({"num_layers": 0, "window": -1}, ["num_layers=0", "window=-1"]),
        ({"layer_pattern": "wx", "window": 4}, ["layer_pattern=wx is not a row of the letters w, f, W and F"]),
        ({"layer_pattern": ""}, ["is not a row of the letters"]),
        ({"layer_pattern": "FFF"}, ["layer_pattern=FFF has more letters than num_layers=2. Use null, or num_layers=3"]),
        ({"layer_pattern": "FW"}, ["layer_pattern=FW has layers with a window, and window=null"]),
        ({"layer_pattern": "fF"}, ["layer_pattern=fF has layers with rotary angles, and positions=learned"]),
        ({"parallel_block": "two_norms", "norm_order": "branch"}, ["parallel_block=two_norms needs norms before"]),
        ({"norm": "rmsnorm", "norm_bias": True}, ["norm_bias=true needs norm=layernorm"]),
        ({"norm_weight": "none", "norm_bias": True}, ["norm_bias=true needs a norm with a weight"]),
        ({"attention_cap": 0.0, "logit_cap": -1.0}, ["attention_cap=0.0 must be above 0", "logit_cap=-1.0 must be"]),
        ({"attention_scale": 0.0, "residual_scale": 0.0}, ["attention_scale=0.0 must", "residual_scale=0.0 must"]),
        ({"embedding_scale": 0.0, "logit_scale": -2.0}, ["embedding_scale=0.0 must be", "logit_scale=-2.0 must be"]),
        ({"z_loss": -1.0}, ["z_loss=-1.0 must be at least 0"]),
        (ROTARY | {"rotary_share": 1.5}, ["rotary_share=1.5 is not a share of a head's numbers"]),
        (ROTARY | {"rotary_share": 0.2}, ["x rotary_share=0.2 is 3 numbers, and rotary positions turn pairs"]),
        (ROTARY | {"rotary_scaling": "yarn", "rotary_factor": 2.0}, ["rotary_original_len=null must be set with"]),
        (ROTARY | LONGROPE | {"rotary_long_factors": (2.0,)}, ["rotary_long_factors=", "is not a list of 8 numbers"]),
        (ROTARY | LONGROPE | {"rotary_original_len": 1}, ["rotary_original_len=1 must be at least 2"]),
        (ROTARY | {"rotary_scaling": "llama3", "rotary_original_len": 8, "rotary_high_factor": 1.0},
         ["rotary_high_factor=1.0 must be above rotary_low_factor=1"]),
        (ROTARY | {"rotary_scaling": "yarn", "rotary_original_len": 8, "rotary_beta_fast": 1.0},
         ["rotary_beta_fast=1.0 must be above rotary_beta_slow=1"]),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        tiny(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, [f"num_heads={heads}" for heads in (2, 4, 8, 16, 32, 64)]),
        (ROTARY | {"num_heads": 3}, [f"num_heads={heads}" for heads in (1, 2, 4, 8, 16, 32)]),
        (ROTARY | {"layer_pattern": "wwf", "window": 4}, ["layer_pattern=wf", "num_layers=3"]),
        (ROTARY | {"layer_pattern": "FFF"}, ["layer_pattern=F", "num_layers=3"]),
        ({"head_width": 7, "positions": "rotary"}, ["head_width=8", "positions=learned"]),
        ({"attention_cap": 0.0}, ["attention_cap=null"]),
        ({"attention_cap": -1.0}, []),
    ],
)
def test_what_a_message_says_to_type_is_allowed(changes: dict[str, Any], ways: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        tiny(**changes)
    assert caught.value.ways == (tuple(Way((word,)) for word in ways),)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rotary_base": 5e5}, "rotary_base=500000.0 has an effect only with model.positions=rotary"),
        (ROTARY | {"rotary_factor": 2.0}, "rotary_factor=2.0 has an effect only with model.rotary_scaling=linear or"),
        (ROTARY | {"rotary_scaling": "linear"}, "rotary_scaling=linear has an effect only with another rotary_factor"),
        (ROTARY | LONGROPE | {"rotary_factor": 2.0}, "rotary_factor=2.0 has an effect in longrope only with"),
        (ROTARY | {"local_rotary_base": 5e4}, "local_rotary_base=50000.0 has an effect only in layers with a window"),
        (ROTARY | {"window": 4, "local_rotary_base": 5e4, "rotary_base": 5e5}, "rotary_base=500000.0 has an effect"),
        (ROTARY | {"layer_pattern": "F", "rotary_share": 0.5}, "rotary_share=0.5 has an effect only in layers with"),
        (ROTARY | {"layer_pattern": "fF", "window": 4}, "window=4 has an effect only in layers w or W"),
        (ROTARY | {"num_positions": 99}, "num_positions=99 has an effect only with model.positions=learned"),
    ],
)
def test_settings_without_an_effect_are_named(changes: dict[str, Any], words: str) -> None:
    (problem,) = tiny(**changes).unused()
    assert words in problem.text()


def test_settings_with_an_effect_are_not_named() -> None:
    assert not [problem for model in (FAMILY_MODELS | DEEP_FAMILY_MODELS).values() for problem in model.unused()]


def test_words_are_checked_when_built_from_data() -> None:
    data = {"kind": "gpt", "num_layers": 2, "width": 64, "num_heads": 4, "seq_len": 16}
    settings = made(data)
    assert settings == tiny()
    assert made(settings.to_dict()) == settings
    older = data | {"bias": False, "parallel_block": True, "activation": "swiglu"}
    assert made(older) == tiny(bias="none", parallel_block="one_norm", activation="silu", gated=True)
    assert made(data | {"bias": True, "parallel_block": False}) == tiny()
    with pytest.raises(SettingsError) as caught:
        made(data | {"activation": "sillu", "positons": "rotary"})
    assert "Did you mean silu?" in str(caught.value)
    assert "Did you mean model.positions=rotary?" in str(caught.value)


_ROTARY: dict[str, Any] = {"positions": "rotary"}
_LOCAL = _ROTARY | {"window": 4, "local_rotary_base": 500.0}
_YARN = _ROTARY | {"rotary_scaling": "yarn", "rotary_factor": 2.0, "rotary_original_len": 8}
_LONGROPE = _ROTARY | {
    "rotary_scaling": "longrope", "rotary_original_len": 8, "rotary_short_factors": (1.0,) * 8,
    "rotary_long_factors": (2.0,) * 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        *(({key: value}, key, "only with model.positions=rotary")
          for key, value in {"rotary_base": 500.0, "rotary_share": 0.5, "rotary_factor": 2.0}.items()),
        (_ROTARY | {"local_rotary_base": 500.0}, "local_rotary_base", "only in layers with a window"),
        (_ROTARY | {"window": 4, "layer_pattern": "Wf", "local_rotary_base": 500.0}, "local_rotary_base", "a window"),
        (_LOCAL | {"rotary_base": 500.0}, "rotary_base", "only in layers that read all tokens"),
        (_LOCAL | {"rotary_scaling": "linear", "rotary_factor": 2.0}, "rotary_scaling", "only in layers that read all"),
        (_LOCAL | {"layer_pattern": "wF", "rotary_base": 500.0}, "rotary_base", "only in layers that read all tokens"),
        (_ROTARY | {"rotary_scaling": "linear"}, "rotary_scaling", "only with another rotary_factor than 1"),
        (_ROTARY | {"rotary_factor": 2.0}, "rotary_factor", "rotary_scaling=linear or llama3 or yarn or longrope"),
        (_YARN | {"rotary_high_factor": 8.0}, "rotary_high_factor", "rotary_scaling=llama3, and it is yarn"),
        (_YARN | {"rotary_short_factors": (1.0,)}, "rotary_short_factors", "rotary_scaling=longrope"),
        (_LONGROPE | {"rotary_beta_fast": 8.0}, "rotary_beta_fast", "rotary_scaling=yarn"),
        (_LONGROPE | {"rotary_rounds": False}, "rotary_rounds", "Leave it out, which is true."),
        (_LONGROPE | {"rotary_factor": 2.0, "rotary_attention_factor": 1.5}, "rotary_factor", "in longrope only with"),
        (_ROTARY | {"num_positions": 32}, "num_positions", "rotary positions have no table"),
        (_ROTARY | {"window": 4, "layer_pattern": "fF"}, "window", "only in layers w or W"),
        (_ROTARY | {"layer_pattern": "ff"}, "layer_pattern", "makes all layers as they are without it"),
        ({"layer_pattern": "F"}, "layer_pattern", "makes all layers as they are without it"),
        (_ROTARY | {"window": 4, "layer_pattern": "w"}, "layer_pattern", "makes all layers as they are without it"),
        ({"norm": "rmsnorm", "norm_bias": False}, "norm_bias", "only on layer norms with a weight"),
        ({"norm_weight": "none", "norm_bias": False}, "norm_bias", "only on layer norms with a weight"),
    ],
)
def test_a_setting_without_an_effect_beside_the_others_is_named(settings: Any, key: str, words: str) -> None:
    problems = {problem.key: split_ways(problem.text())[0] for problem in tiny(**settings).unused()}
    assert words in problems[key]
    assert "Leave it out" in problems[key]


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"norm_bias": False}, {"bias": "none", "norm_bias": True}, _ROTARY | {"rotary_base": 500.0},
        _LOCAL | {"layer_pattern": "wf", "rotary_base": 500.0}, _LOCAL | {"rotary_share": 0.5}, _YARN,
        _YARN | {"rotary_factor": 1.0, "rotary_attention_factor": 1.5}, _LONGROPE, {"window": 4, "layer_pattern": "WF"},
        _ROTARY | {"layer_pattern": "fF"},
    ],
)  # fmt: skip
def test_settings_with_an_effect_are_accepted(settings: Any) -> None:
    assert not list(tiny(**settings).unused())


def test_angles_that_no_layer_has_are_not_set() -> None:
    settings = tiny(positions="rotary", layer_pattern="F", rotary_share=0.5, rotary_scaling="linear", rotary_factor=2.0)
    problems = [problem.text() for problem in settings.unused()]
    assert len(problems) == 3
    assert all("only in layers with rotary angles, and model.layer_pattern has none" in text for text in problems)
    assert not list(tiny(num_layers=2, positions="rotary", layer_pattern="fF", rotary_share=0.5).unused())
