"""Megatron-LM's arguments as our settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmtrain.errors import CheckpointError, SettingsError
from lmtrain.exchange.megatron.convert_arguments_and_settings import (
    WeightFacts,
    argument_getter,
    megatron_arguments,
    settings_from_arguments,
)
from lmtrain.exchange.megatron.convert_decoder_arguments import flags_to_repeat
from lmtrain.exchange.torch_files.read_pickle_as_data import CallRecord
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.exchange.models import as_imported, bert, gpt2, llama


@pytest.mark.parametrize(
    ("told", "given", "activation"),
    [
        ({"bias_gelu_fusion": True}, {}, "gelu_tanh"),
        ({"bias_gelu_fusion": False}, {}, "gelu"),
        ({}, {"activation": "gelu"}, "gelu"),
        ({}, {}, r"does not state its kind of gelu"),
        ({"bias_gelu_fusion": True, "openai_gelu": True}, {}, "--openai-gelu true would have to be false"),
    ],
)
def test_which_gelu_a_bert_has(told: dict[str, object], given: dict[str, object], activation: str) -> None:
    """The fused kernel of its blocks is one by tanh, that of its head never is."""
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=True, bias="all", norm_has_bias=True,
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
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=False, bias="all" if has_bias else "none",
        norm_has_bias=True, has_output=False, has_pair=False,
    )  # fmt: skip
    settings = settings_from_arguments(({"num_attention_heads": 4} | told).get, found, 331, {}, "here")
    assert settings.to_dict()["activation"] == activation


def test_one_dropout_is_kept_or_chosen() -> None:
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=False, bias="all", norm_has_bias=True,
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
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=False, bias="all", norm_has_bias=True,
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
        *((False, {"position_embedding_type": kind}, {"positions": "rotary"}, f"type {kind} would have to be rope or")
          for kind in ("yarn", "mrope", "relative", "learned_absolute", "new_kind")),
        *((True, {"position_embedding_type": kind}, {}, f"type {kind} would have to be learned_absolute, as its")
          for kind in ("rope", "none", "relative")),
        (True, {"use_rotary_position_embeddings": True}, {}, "type rope would have to be learned_absolute, as its"),
    ],
)  # fmt: skip
def test_which_positions_a_gpt_has(
    has_table: bool, told: dict[str, object], given: dict[str, object], positions: str
) -> None:
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=40 if has_table else None, is_encoder=False, bias="all",
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
        num_layers=2, width=48, ffn_width=192, num_positions=None, is_encoder=True, bias="all", norm_has_bias=True,
        has_output=False, has_pair=True,
    )  # fmt: skip
    get = {"num_attention_heads": 4, "seq_length": 40, "position_embedding_type": "rope"}.get
    with pytest.raises(CheckpointError, match="type rope would have to be learned_absolute, as its weights have no"):
        settings_from_arguments(get, found, 331, {"activation": "gelu"}, "here")


def facts_of(s: GPTSettings) -> WeightFacts:
    return WeightFacts(
        num_layers=s.num_layers, width=s.width, ffn_width=s.ffn, is_encoder=False, bias=s.bias,
        num_positions=s.position_rows if s.positions == "learned" else None, norm_has_bias=s.has_norm_bias,
        has_output=not s.tied, has_pair=False,
    )  # fmt: skip


LLAMA3 = {"rotary_original_len": 8192, "rotary_low_factor": 1.0, "rotary_high_factor": 4.0}
DECODERS = {
    "plain": llama(), "biases of queries": llama(bias="qkv"),
    "biases of norms": gpt2(bias="none", norm_bias=True, activation="gelu"),
    "1 + weight": llama(norm_weight="from_zero"), "norms of queries": llama(qk_norm="head"),
    "squares": gpt2(activation="relu2"), "share": llama(rotary_share=0.5),
    "linear": llama(rotary_scaling="linear", rotary_factor=4.0),
    "llama3": llama(rotary_scaling="llama3", rotary_factor=32.0, **LLAMA3),
    "window in turn": llama(num_layers=8, window=9, layer_pattern="wwwf"),
    "no pattern": llama(num_layers=5, window=9, layer_pattern="wfwff"),
    "angles in turn": llama(num_layers=8, layer_pattern="fffF"),
    "both in turn": llama(num_layers=8, window=9, layer_pattern="wfWF"), "no angles": llama(layer_pattern="F"),
    "window without angles": llama(window=9, layer_pattern="W"),
    "table and windows": gpt2(num_layers=4, window=9, layer_pattern="WF"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_words_of_a_decoder_go_out_and_come_back(name: str) -> None:
    settings = DECODERS[name]
    get = argument_getter(CallRecord(None, state=megatron_arguments(settings, 1, 1, "fp32")))
    assert settings_from_arguments(get, facts_of(settings), 331, {}, "here") == as_imported(settings)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"window_size": (8, 0), "window_attn_skip_freq": 4}, {"window": 9, "layer_pattern": "wwwf"}),
        ({"window_size": (8, 0), "window_attn_skip_freq": 1}, {}),
        ({"window_attn_skip_freq": 4, "no_rope_freq": 4}, {"layer_pattern": "fffF"}),
        ({"window_size": [8, 0], "no_rope_freq": [0, 0, 1, 0] * 2}, {"window": 9, "layer_pattern": "wwWw"}),
        ({"position_embedding_type": "none", "rotary_base": 7, "rotary_percent": 0.5}, {"layer_pattern": "F"}),
        ({"layernorm_zero_centered_gamma": True}, {"norm_weight": "from_zero"}),
        ({"rotary_seq_len_interpolation_factor": 1, "rope_scaling_factor": 4.0}, {}),
        ({"window_size": (8, 0), "window_attn_skip_freq": [1, 0, 1]}, "--window-attn-skip-freq .* list of 8 times"),
        ({"no_rope_freq": [2] * 8}, "--no-rope-freq would have to be a whole number above 0, or a list of 8"),
        ({"window_size": (8, 1)}, r"--window-size would have to be \(tokens back, 0\)"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 4}, "-factor 4 would have to be 1 beside"),
        ({"qk_layernorm": True, "normalization": "LayerNorm"}, "--qk-layernorm true .* --normalization RMSNorm"),
        ({"add_qkv_bias": True}, "--add-qkv-bias true would have to be false, as its weights have no such biases"),
        ({"qk_l2_norm": True}, "--qk-l2-norm true would have to be false"),
        ({"qk_l2_norm": [1] * 900}, r"--qk-l2-norm \[1,1,.{195}\.\.\. would"),
        ({"no_rope_freq": [0] * 1001}, "--no-rope-freq would have to be"),
    ],
)
def test_what_arguments_of_a_decoder_mean(told: dict[str, object], expected: dict[str, Any] | str) -> None:
    plain = llama(num_layers=8)
    state: dict[str, object] = (
        megatron_arguments(plain, 1, 1, "fp32") | {"use_rotary_position_embeddings": False} | told
    )
    get = argument_getter(CallRecord(None, state=state))
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            settings_from_arguments(get, facts_of(plain), 331, {}, "here")
    else:
        assert settings_from_arguments(get, facts_of(plain), 331, {}, "here") == replace(plain, **expected)


@pytest.mark.parametrize("name", ["apply_layernorm_1p", "qk_layernorm", "squared_relu", "swiglu", "window_size"])
def test_words_that_a_bert_lacks_are_refused(name: str) -> None:
    found = WeightFacts(
        num_layers=2, width=48, ffn_width=192, num_positions=40, is_encoder=True, bias="all", norm_has_bias=True,
        has_output=False, has_pair=True,
    )  # fmt: skip
    get = {"num_attention_heads": 4, "bias_gelu_fusion": True, name: True}.get
    with pytest.raises(CheckpointError, match=f"--{name.replace('_', '-')} true would have to be"):
        settings_from_arguments(get, found, 331, {}, "here")


def test_flags_that_megatron_takes_from_no_checkpoint_are_named() -> None:
    assert flags_to_repeat(gpt2()) == ""
    assert flags_to_repeat(bert(activation="gelu", norm_eps=1e-12)) == "--norm-epsilon 1e-12 --no-bias-gelu-fusion"
    settings = DECODERS["both in turn"]
    assert flags_to_repeat(settings) == (
        "--no-rope-freq '[0,0,1,1,0,0,1,1]' --window-size '(8,0)' --window-attn-skip-freq '[1,0,1,0,1,0,1,0]'"
    )
    assert flags_to_repeat(DECODERS["llama3"]) == "--use-rope-scaling --rope-scaling-factor '32.0'"
