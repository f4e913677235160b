"""Megatron-LM's arguments as our settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmtrain.errors import CheckpointError, SettingsError
from lmtrain.exchange.megatron.checkpoint_args import WeightFacts, settings_from_arguments
from tests.unit.exchange.models import bert, gpt2


@pytest.mark.parametrize(
    ("told", "given", "activation"),
    [
        ({"bias_gelu_fusion": True}, {}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, {}, "gelu"),
        ({}, {"activation": "gelu"}, "gelu"),
        ({}, {}, r"does not state its kind of gelu"),
        ({"bias_gelu_fusion": True, "openai_gelu": True}, {}, "--openai-gelu would have to be left out"),
    ],
)
def test_which_gelu_a_bert_has(told: dict[str, object], given: dict[str, object], activation: str) -> None:
    """The fused kernel of its blocks is one by tanh, that of its head never is."""
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=True, has_bias=True, norm_has_bias=True,
        has_output=False, has_pair=True,
    )  # fmt: skip
    get = ({"num_attention_heads": 4} | told).get
    if activation.startswith("gelu"):
        settings = settings_from_arguments(get, found, 331, given, "here")
        assert settings.to_dict() == bert(norm_order="pre", activation=activation).to_dict()
    else:
        with pytest.raises(CheckpointError, match=activation):
            settings_from_arguments(get, found, 331, given, "here")


@pytest.mark.parametrize(
    ("has_bias", "told", "activation"),
    [
        (True, {}, "gelu_tanh"),
        (True, {"bias_gelu_fusion": False}, "gelu"),
        (False, {}, "gelu"),
        (False, {"bias_gelu_fusion": True}, "gelu"),
        (False, {"openai_gelu": True}, "gelu_tanh"),
    ],
)
def test_which_gelu_a_gpt_has(has_bias: bool, told: dict[str, object], activation: str) -> None:
    """The fused kernel, which is one by tanh, runs only where there is a bias to fuse."""
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=False, has_bias=has_bias,
        norm_has_bias=True, has_output=False, has_pair=False,
    )  # fmt: skip
    settings = settings_from_arguments(({"num_attention_heads": 4} | told).get, found, 331, {}, "here")
    assert settings.to_dict()["activation"] == activation


def test_one_dropout_is_kept_or_chosen() -> None:
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=False, has_bias=True, norm_has_bias=True,
        has_output=False, has_pair=False,
    )  # fmt: skip
    told: dict[str, object] = {"num_attention_heads": 4, "hidden_dropout": 0.1, "rotary_base": 500000}
    for more, given, expected in (({}, {}, 0.1), ({"attention_dropout": 0.0}, {"dropout": 0.2}, 0.2)):
        settings = settings_from_arguments((told | more).get, found, 331, given, "here")
        assert settings.to_dict()["dropout"] == expected
        assert not list(settings.unused()), "a base of angles that the arguments hold for no reason is left there"
    with pytest.raises(CheckpointError, match=r"--attention-dropout 0\.0 would have to be .* --set dropout=SHARE"):
        settings_from_arguments((told | {"attention_dropout": 0.0}).get, found, 331, {}, "here")


def test_a_length_and_a_table_can_be_set_and_a_setting_without_effect_is_refused() -> None:
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=False, has_bias=True, norm_has_bias=True,
        has_output=False, has_pair=False,
    )  # fmt: skip
    told: dict[str, object] = {"num_attention_heads": 4, "seq_length": 24, "max_position_embeddings": 40}
    get, rotary = told.get, (told | {"position_embedding_type": "rope"}).get
    given: dict[str, object] = {"seq_len": 24, "num_positions": 40}
    assert settings_from_arguments(get, found, 331, {}, "here") == gpt2(dropout=0.0)
    assert settings_from_arguments(get, found, 331, given, "here") == gpt2(**given)
    with pytest.raises(SettingsError, match=r"--set num_positions=40 has an effect only with model\.positions=learned"):
        settings_from_arguments(rotary, replace(found, num_positions=None), 331, given, "here")


@pytest.mark.parametrize(
    ("has_table", "told", "given", "positions"),
    [
        (True, {}, {}, "learned"),
        (True, {"position_embedding_type": "learned_absolute"}, {}, "learned"),
        (False, {"position_embedding_type": "rope"}, {}, "rotary"),
        (False, {"use_rotary_position_embeddings": True}, {}, "rotary"),
        (False, {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True}, {}, "rotary"),
        (False, {}, {"positions": "rotary"}, "rotary"),
        (False, {}, {}, "does not state its kind of positions.* --set positions=rotary"),
        *((False, {"position_embedding_type": kind}, {"positions": "rotary"}, f"type {kind} would have to be rope")
          for kind in ("yarn", "mrope", "relative", "none", "learned_absolute", "new_kind")),
        *((True, {"position_embedding_type": kind}, {}, f"type {kind} would have to be learned_absolute, as its")
          for kind in ("rope", "none", "relative")),
        (True, {"use_rotary_position_embeddings": True}, {}, "type rope would have to be learned_absolute, as its"),
    ],
)  # fmt: skip
def test_which_positions_a_gpt_has(
    has_table: bool, told: dict[str, object], given: dict[str, object], positions: str
) -> None:
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=40 if has_table else None, is_encoder=False, has_bias=True,
        norm_has_bias=True, has_output=False, has_pair=False,
    )  # fmt: skip
    get = ({"num_attention_heads": 4, "seq_length": 40} | told).get
    if positions in ("learned", "rotary"):
        assert settings_from_arguments(get, found, 331, given, "here").to_dict()["positions"] == positions
    else:
        with pytest.raises(CheckpointError, match=positions):
            settings_from_arguments(get, found, 331, given, "here")


def test_a_bert_with_rotary_angles_is_refused() -> None:
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=None, is_encoder=True, has_bias=True, norm_has_bias=True,
        has_output=False, has_pair=True,
    )  # fmt: skip
    get = {"num_attention_heads": 4, "seq_length": 40, "position_embedding_type": "rope"}.get
    with pytest.raises(CheckpointError, match="type rope would have to be learned_absolute, as its weights have no"):
        settings_from_arguments(get, found, 331, {"activation": "gelu"}, "here")
