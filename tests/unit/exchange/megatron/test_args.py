"""Megatron-LM's arguments as our settings."""

from __future__ import annotations

import pytest

from lmtrain.errors import CheckpointError
from lmtrain.exchange.megatron.args import Found, settings_from
from tests.unit.exchange.models import bert


@pytest.mark.parametrize(
    ("told", "given", "activation"),
    [
        ({"bias_gelu_fusion": True}, {}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, {}, "gelu"),
        ({}, {"activation": "gelu"}, "gelu"),
        ({}, {}, r"does not tell which gelu it has"),
        ({"bias_gelu_fusion": True, "openai_gelu": True}, {}, "--openai-gelu would have to be left out"),
    ],
)
def test_which_gelu_a_bert_has(told: dict[str, object], given: dict[str, object], activation: str) -> None:
    """The fused kernel of its blocks is one by tanh, that of its head never is."""
    found = Found(
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=True, has_bias=True, norm_has_bias=True,
        has_output=False, has_pair=True,
    )  # fmt: skip
    get = ({"num_attention_heads": 4} | told).get
    if activation.startswith("gelu"):
        settings = settings_from(get, found, 331, given, "here")
        assert settings.to_dict() == bert(norm_order="pre", activation=activation).to_dict()
    else:
        with pytest.raises(CheckpointError, match=activation):
            settings_from(get, found, 331, given, "here")
