"""Gemma's traits that no other family has: embeddings scaled by a rounded number, two rotary bases, layers' windows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.errors import CheckpointError
from lmtrain.exchange.huggingface.config_json import hf_config, hf_family, restored_config, settings_from_config
from lmtrain.exchange.huggingface.families.gemma import rounded
from lmtrain.exchange.huggingface.import_and_export import export_hf
from lmtrain.exchange.huggingface.model_family_base import families
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.exchange.models import llama, save

SCALING = {"rope_type": "linear", "factor": 8.0}
NESTED = {"full_attention": {"rope_theta": 5e5, **SCALING}, "sliding_attention": {"rope_theta": 2e4}}


def config(**changes: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 7, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {"model_type": "gemma3_text", "dtype": "float32", "sliding_window": 9, **sizes, **changes}


def imported(**changes: Any) -> GPTSettings:
    _, settings = settings_from_config(config(**changes), "config.json", pair_head=False)
    assert isinstance(settings, GPTSettings)
    return settings


def gemma3(**changes: Any) -> GPTSettings:
    values: dict[str, Any] = {
        "num_layers": 3, "head_width": 20, "norm_weight": "from_zero", "norm_order": "sandwich", "qk_norm": "head",
        "activation": "gelu_tanh", "tied": True, "embedding_scale": rounded(math.sqrt(48), "float32"), "window": 9,
        "layer_pattern": "wwf", "local_rotary_base": 500.0, "attention_scale": 24**-0.5,
    }  # fmt: skip
    return llama(**(values | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: str) -> None:
    # because: 257 and 259 lie halfway between numbers of bf16, 2049 and 2051 between those of fp16
    values = [math.sqrt(width) for width in range(1, 6000)] + [257.0, 259.0, 2049.0, 2051.0, 0.1]
    expected = torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype)).tolist()
    assert [rounded(value, dtype) for value in values] == expected


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", 6.9375), ("float16", 6.9296875)])
def test_the_factor_of_embeddings_is_that_of_the_stored_type(dtype: str, expected: float) -> None:
    assert imported(dtype=dtype).embedding_scale == imported(dtype=None, torch_dtype=dtype).embedding_scale == expected
    with pytest.raises(CheckpointError, match="dtype=null would have to be float32"):
        imported(dtype=None)


def test_an_export_in_another_type_is_refused_with_the_types_that_fit(tmp_path: Path) -> None:
    source = save(tmp_path / "run", gemma3(embedding_scale=6.9375))
    with pytest.raises(CheckpointError, match=r"scale=6.9375, .* by 6.9282 where weights .* Use --dtype bf16"):
        export_hf(source, tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()
    assert export_hf(source, tmp_path / "out", dtype="bf16", check=False)["model_type"] == "gemma3_text"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"embedding_scale": 7.0}, "embedding_scale=7.0 would have to be 6.9282"),
        ({"attention_scale": 0.3}, "attention_scale=0.3 would have to be 1 / sqrt of a whole number"),
        ({"layer_pattern": "wF"}, "layer_pattern=wF would have to give all layers rotary angles"),
        ({"num_heads": 5, "num_kv_heads": 5}, "num_heads=5 would have to divide 48"),
        ({"rotary_scaling": "yarn", "rotary_factor": 2.0, "rotary_original_len": 16, "rotary_rounds": False},
         "rotary_rounds=false would have to be true"),
        ({"local_rotary_base": None, "rotary_scaling": "linear", "rotary_factor": 2.0},
         "rotary_scaling=linear would have to be none in layers with a window"),
    ],
)  # fmt: skip
def test_a_model_that_is_nearly_a_gemma_is_refused(changes: dict[str, Any], said: str) -> None:
    (problem,) = [text for holds, text in families()["gemma3_text"].rules(gemma3(**changes)) if not holds]
    assert f"model.{said}" in problem


def test_each_gemma_is_told_from_the_others_by_its_norms() -> None:
    assert hf_family(gemma3()) == "gemma3_text"
    second = gemma3(qk_norm="none", local_rotary_base=None, attention_cap=50.0, logit_cap=30.0)
    assert hf_family(second) == "gemma2"
    plain: dict[str, Any] = {"attention_cap": None, "window": None, "layer_pattern": None, "logit_cap": None}
    assert hf_family(replace(second, norm_order="pre", attention_scale=None, **plain)) == "gemma"


@pytest.mark.parametrize(
    ("changes", "pattern", "window"),
    [
        ({}, "wwwwwf", 9),
        ({"sliding_window_pattern": 3}, "wwf", 9),
        ({"num_hidden_layers": 1}, None, 9),
        ({"sliding_window_pattern": 1}, None, None),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}, "fw", 9),
    ],
)
def test_layers_with_a_window(changes: dict[str, Any], pattern: str | None, window: int | None) -> None:
    settings = imported(**changes)
    assert (settings.layer_pattern, settings.window) == (pattern, window)
    # because: a setting that no layer reads would be refused
    expected = (1e6 if window is None else 1e4, None) if pattern is None else (1e6, 1e4)
    assert (settings.rotary_base, settings.local_rotary_base) == expected
    written = hf_config(settings, {}, "float32")
    again = settings_from_config(written, "config.json", pair_head=False)[1]
    assert again == settings


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": SCALING},
        {"rope_parameters": NESTED},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": SCALING, "rope_parameters": NESTED},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": SCALING,
         "rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
    ],
)  # fmt: skip
def test_angles_in_the_form_of_either_version_are_read_and_written_in_both(changes: dict[str, Any]) -> None:
    settings = imported(**changes)
    found = (settings.rotary_base, settings.local_rotary_base, settings.rotary_scaling, settings.rotary_factor)
    assert found == (5e5, 2e4, "linear", 8.0)
    written = restored_config(settings, config(**changes), {}, "float32")
    assert (written["rope_theta"], written["rope_local_base_freq"], written["rope_scaling"]) == (5e5, 2e4, SCALING)
    assert written["rope_parameters"]["full_attention"].items() >= SCALING.items()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 1e4, "rope_parameters": NESTED}, "rope_theta=10000.0 would have to be 500000.0, as in full"),
        ({"rope_scaling": SCALING, "rope_parameters": NESTED}, "rope_local_base_freq=10000.0 would have to be 20000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling lacks rope_type"),
        ({"rope_scaling": {**SCALING, "factor": 4.0}, "rope_theta": 5e5, "rope_local_base_freq": 2e4,
          "rope_parameters": {"full_attention": {"rope_type": "yarn", "beta_fast": 8.0}}}, "has beta_fast"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "would have to have the groups"),
        ({"rope_parameters": {"sliding_attention": SCALING}}, "sliding_attention of rope_parameters would have to"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type dynamic, which would have to be"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
          "original_max_position_embeddings": 16}, "would have to be in rope_scaling too, where transformers 5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate=false of rope_scaling"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 would have to be a number above 0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0 would have to be a whole number"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=true would have to be false"),
        ({"attention_bias": True}, "attention_bias=true would have to be false"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 would have to be null"),
        ({"hidden_size": 10**400}, "model.width"),
    ],
)  # fmt: skip
def test_a_gemma_3_that_lmtrain_does_not_compute_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        imported(**changes)


def test_the_model_of_texts_and_images_is_refused_with_the_way_to_its_language_model() -> None:
    with pytest.raises(CheckpointError, match=r"gemma3, which is a model of texts and images, .* import NEW"):
        settings_from_config({"model_type": "gemma3", "text_config": {}}, "config.json", pair_head=False)


def test_gelu_of_the_first_gemma_is_the_tanh_form_and_an_export_says_so() -> None:
    original = config(model_type="gemma", hidden_act="gelu", sliding_window=None)
    _, settings = settings_from_config(original, "config.json", pair_head=False)
    assert isinstance(settings, GPTSettings)
    assert settings.activation == "gelu_tanh"
    assert restored_config(settings, original, {}, "float32")["hidden_act"] == "gelu_pytorch_tanh"
    second = config(model_type="gemma2", hidden_activation="gelu")
    _, settings = settings_from_config(second, "config.json", pair_head=False)
    assert isinstance(settings, GPTSettings)
    assert settings.activation == "gelu"


def test_a_comparison_in_fp32_takes_the_factor_of_fp32() -> None:
    settings = gemma3(embedding_scale=6.9375)
    assert families()["gemma3_text"].in_fp32(settings).embedding_scale == rounded(math.sqrt(48), "float32")
