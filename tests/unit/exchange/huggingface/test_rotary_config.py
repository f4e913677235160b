"""Rotary angles in config.json, in the forms of transformers 4 and 5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmtrain.errors import CheckpointError
from lmtrain.exchange.huggingface.config_json import hf_config, hf_family, restored_config, settings_from_config
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.exchange.models import llama

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
SIZES = {"hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": 128, "rope_theta": 500.0}


def read(family: str = "llama", **entries: Any) -> dict[str, Any]:
    _, settings = settings_from_config({"model_type": family, **SIZES, **entries}, "here", pair_head=False)
    return settings.to_dict()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_both_forms_are_written(family: str) -> None:
    settings = llama(
        rotary_base=500.0, rotary_scaling="llama3", rotary_factor=8.0, rotary_original_len=32,
        window=5 if family == "mistral" else None,
    )  # fmt: skip
    config = hf_config(settings, {}, "float32")
    assert config["model_type"] == family
    assert (config["rope_theta"], config["rope_scaling"]) == (500.0, LLAMA3)
    assert config["rope_parameters"] == LLAMA3 | {"rope_theta": 500.0}


def test_transformers_4_reads_the_original_length_of_longrope_outside_of_the_group() -> None:
    settings = llama(
        rotary_scaling="longrope", rotary_factor=4.0, rotary_original_len=32, rotary_short_factors=(1.0,) * 6,
        rotary_long_factors=(2.0,) * 6,
    )  # fmt: skip
    config = hf_config(settings, {}, "float32")
    assert config["original_max_position_embeddings"] == 32
    assert config["rope_scaling"]["attention_factor"] == settings.angle_factor  # because: it takes no factor from there


def test_plain_angles_have_no_scaling() -> None:
    config = hf_config(llama(rotary_base=500.0), {}, "float32")
    assert "rope_scaling" not in config
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"rope_scaling": YARN}, {"rotary_beta_fast": 32.0, "rotary_beta_slow": 1.0, "rotary_rounds": True}),
        ({"rope_scaling": YARN | {"beta_fast": 0, "beta_slow": 0}}, {"rotary_beta_fast": 32.0}),
        ({"rope_scaling": YARN | {"truncate": False}}, {"rotary_rounds": False}),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, {"rotary_original_len": 128}),
        ({"rope_scaling": YARN | {"factor": None}}, {"rotary_factor": 4.0}),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, {"rotary_attention_factor": None}),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, {"rotary_attention_factor": 1.0}),
        ({"rope_scaling": YARN | {"attention_factor": 1.3, "mscale": 2.0, "mscale_all_dim": 1.0}},
         {"rotary_attention_factor": 1.3}),
        ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
         {"rotary_factor": 4.0, "rotary_original_len": 32, "rotary_short_factors": [1.0] * 6}),
        ({"rope_scaling": LONGROPE}, {"rotary_factor": 1.0, "rotary_original_len": 128}),
        ({"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32, "factor": 2.0}, "rope_theta": None},
         {"rotary_base": 10000.0, "rotary_factor": 2.0, "rotary_original_len": 32}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 7.0}, "rope_theta": None},
         {"rotary_base": 7.0, "rotary_factor": 3.0, "rotary_scaling": "linear"}),
    ],
)  # fmt: skip
def test_numbers_are_those_that_transformers_takes(entries: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = read(**entries)
    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"rope_scaling": LONGROPE | {"original_max_position_embeddings": 32}}, "would have to be beside it too"),
        ({"rope_scaling": LONGROPE | {"factor": 3.0}, "original_max_position_embeddings": 32},
         r"factor=3\.0 of rope_scaling would have to be 4\.0"),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
         "original_max_position_embeddings=64 would have to be 32, as in rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 64},
         "original_max_position_embeddings=64 would have to be in rope_scaling too"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": None}}, "lacks high_freq_factor, which llama3 angles need"),
        ({"rope_scaling": YARN | {"twist": 1}}, "rope_scaling has twist, which yarn angles lack"),
        ({"rope_scaling": LONGROPE | {"short_factor": "1"}}, "short_factor in rope_scaling would have to be a list"),
        ({"rope_parameters": YARN}, r"without rope_theta=500\.0 beside it, or with a rope_scaling of the same yarn"),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor in .* would have to be 1"),
    ],
)  # fmt: skip
def test_what_transformers_4_and_5_read_differently_is_refused(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(**entries)


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_theta": 500.0, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 7.0}},
    ],
)
def test_an_export_of_an_import_has_both_forms(entries: dict[str, Any]) -> None:
    original = {"model_type": "llama", **SIZES, **entries}
    if "rope_theta" not in entries:
        del original["rope_theta"]
    _, settings = settings_from_config(original, "here", pair_head=False)
    config = restored_config(settings, original, {}, "float32")
    assert (config["rope_theta"], config["rope_scaling"]) == (500.0, LLAMA3)
    assert config["rope_parameters"] == LLAMA3 | {"rope_theta": 500.0}


@pytest.mark.parametrize(("trained", "longest"), [(64, 128), (256, 256)])
def test_the_original_length_survives_training_at_another(trained: int, longest: int) -> None:
    scaling = {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    original = {"model_type": "llama", **SIZES, **scaling}
    _, before = settings_from_config(original, "here", pair_head=False)
    assert isinstance(before, GPTSettings)
    config = restored_config(replace(before, seq_len=trained), original, {}, "float32")
    assert config["max_position_embeddings"] == longest
    assert config["rope_scaling"]["original_max_position_embeddings"] == 128


def test_an_imported_model_keeps_its_family_where_it_can() -> None:
    settings = llama()
    assert (hf_family(settings), hf_family(settings, "mistral"), hf_family(settings, "bert")) == (
        "llama", "mistral", "llama"
    )  # fmt: skip


def test_heads_that_do_not_divide_the_width_are_those_of_a_mistral() -> None:
    """LLaMA's class refuses them, Mistral's does not."""
    config = hf_config(llama(width=50, head_width=12), {}, "float32")
    assert (config["model_type"], config["sliding_window"], config["head_dim"]) == ("mistral", None, 12)
