"""Granite's four factors, each in its own sense, and its biases."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.errors import CheckpointError
from lmtrain.exchange.huggingface.config_json import hf_config, hf_family, settings_from_config
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.exchange.models import llama

FACTORS = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 49.0
}  # fmt: skip


def imported(**changes: Any) -> GPTSettings:
    config = {"model_type": "granite", "num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 4, **changes}
    _, settings = settings_from_config(config, "config.json", pair_head=False)
    assert isinstance(settings, GPTSettings)
    return settings


def test_scores_are_multiplied_and_logits_divided() -> None:
    settings = imported(**FACTORS)
    assert (settings.embedding_scale, settings.attention_scale, settings.residual_scale) == (12.0, 0.015625, 0.22)
    assert settings.logit_scale == pytest.approx(1 / 49)
    assert hf_config(settings, {}, "float32").items() >= FACTORS.items()
    assert imported().attention_scale == 1.0  # and not 1 / sqrt(K)


@pytest.mark.parametrize("divisor", [3.0, 7.3, 8, 10, 13.0, 49.0, 1e-3])
def test_the_divisor_of_logits_comes_back_to_the_digit(divisor: float) -> None:
    assert hf_config(imported(logits_scaling=divisor), {}, "float32")["logits_scaling"] == divisor


@pytest.mark.parametrize(
    ("attention", "mlp", "bias"), [(False, False, "none"), (True, True, "all"), (False, True, "mlp")]
)
def test_biases(attention: bool, mlp: bool, bias: str) -> None:
    settings = imported(attention_bias=attention, mlp_bias=mlp)
    assert settings.bias == bias
    written = hf_config(settings, {}, "float32", "granite")
    assert (written["attention_bias"], written["mlp_bias"]) == (attention, mlp)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias=true would have to be false, or mlp_bias be true"),
        ({"attention_bias": [1]}, r"attention_bias=\[1\] would have to be false"),
        ({"logits_scaling": 0}, "logits_scaling=0 would have to be a number above 0"),
        ({"residual_multiplier": 0.0}, "residual_scale"),
        ({"hidden_act": "quick_gelu"}, "hidden_act=quick_gelu would have to be"),
    ],
)
def test_a_granite_that_lmtrain_does_not_compute_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        imported(**changes)


def test_a_llama_with_a_factor_goes_out_as_a_granite() -> None:
    assert hf_family(llama(logit_scale=0.5)) == "granite"
