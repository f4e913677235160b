"""Models that have no counterpart on the other side are refused."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.errors import CheckpointError
from lmtrain.exchange.huggingface.config_json import hf_config, hf_family, ignored_keys, settings_from_config
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings
from tests.unit.exchange.models import bert, gpt2, llama


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (gpt2(parallel_block="one_norm"), "model.parallel_block=one_norm"),
        (gpt2(bias="none"), "model.bias=none"),
        (gpt2(norm="rmsnorm", window=5), "model.norm=rmsnorm .*; model.window=5"),
        (gpt2(num_kv_heads=2), "model.num_kv_heads=2 would have to be 4"),
        (gpt2(head_width=16), "model.head_width=16"),
        (gpt2(activation="relu2"), "nearest is gpt2, for which model.activation=relu2 would have to be gelu"),
        (bert(activation="gelu_tanh"), "model.head_activation=gelu would have to be model.activation=gelu_tanh"),
    ],
)
def test_a_model_that_none_of_theirs_equals_is_refused(settings: ModelSettings, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        hf_family(settings)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5"}, "model_type t5"),
        ({"model_type": ["gpt2"]}, "model_type"),
        ([], "model_type null"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function=relu"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 8}},
            "rope_scaling has angles of type dynamic, which would",
        ),
        ({"model_type": "llama", "is_causal": False}, "is_causal=false would have to be true"),
        ({"model_type": "gpt2", "is_causal": None}, "is_causal=null would have to be true"),
        ({"model_type": "mistral", "partial_rotary_factor": 0.5}, "over the whole head"),
        ({"model_type": "llama", "rope_parameters": {"full_attention": {}}}, "rope_parameters has full_attention"),
        ({"model_type": "llama", "rope_scaling": [1]}, r"rope_scaling=\[1\] would have to be a group"),
        (
            {"model_type": "llama", "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta=10000.0 would have to be 500000.0, as in rope_parameters",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling lacks factor, which linear angles need",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta=10000.0 would have to be 500000.0, as in rope_scaling",
        ),
        (
            {"model_type": "mistral", "rope_scaling": {"rope_type": "default", "type": "linear"}},
            "rope_scaling has rope_type=default and type=linear, which must be equal",
        ),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=true and mlp_bias=false would"),
        ({"model_type": "mistral", "attention_bias": True, "mlp_bias": True}, "attention_bias=true would have"),
        ({"model_type": "llama", "embedding_multiplier": 12.0}, "embedding_multiplier=12.0 would have to be 1, or"),
        (
            {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types would have to be the same for all layers",
        ),
        ({"model_type": "mistral", "layer_types": ["linear_attention"] * 2}, "layer_types would have to be the same"),
        ({"model_type": "mistral", "layer_types": "full_attention"}, "layer_types would have to be the same"),
        ({"model_type": "mistral", "clip_qkv": 8}, "clip_qkv=8 would have to be null"),
        ({"model_type": "qwen2", "use_mrope": True}, "use_mrope=true would have to be false"),
        ({"model_type": "qwen2", "use_sliding_window": "no"}, "use_sliding_window=no would have to be true or false"),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32},
            "sliding_window would have to be set and use_sliding_window true",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1.5},
            "max_window_layers=1.5 would have to be numbers of",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=true would have to be false"),
        (
            {"model_type": "phi3", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling has angles of type linear, which would",
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.75}},
            "partial_rotary_factor=0.5 would have to be 0.75, as in rope_parameters",
        ),
        ({"model_type": "starcoder2", "use_bias": 1}, "use_bias=1 would have to be true or false"),
        ({"model_type": "gpt2", "use_qk_norm": True, "alibi": True}, "use_qk_norm=true .*; alibi=true would"),
        ({"model_type": "bert", "pruned_heads": {"0": [1]}}, r"pruned_heads=\{0: \[1\]\} would have to be \{\}"),
        ({"model_type": "llama", "twist": 2}, "twist=2 is not known to lmtrain, and would have to be removed"),
        ({"model_type": "llama", "no_rope_layers": [1] * 900}, "no_rope_layers a value of more than 1000 characters"),
        ({"model_type": "llama", "hidden_size": "many"}, "model.width=many"),
        ({"model_type": "gpt2", "attn_pdrop": 0.0}, "embd_pdrop=0.1, attn_pdrop=0.0 would have to be equal"),
        ({"model_type": "gpt2", "embd_pdrop": [1]}, r"embd_pdrop=\[1\], .* choose it with --set dropout=SHARE"),
        ({"model_type": "bert", "hidden_dropout_prob": 0}, "attention_probs_dropout_prob=0.1 would have to be equal"),
        ({"model_type": "llama", "attention_dropout": 0.1}, "attention_dropout=0.1, which is for attention alone"),
        ({"model_type": "bert", "hidden_act": "relu", "type_vocab_size": 1}, "type_vocab_size=1 .*hidden_act=relu"),
    ],
)
def test_a_config_that_asks_for_what_we_lack_is_refused(config: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        settings_from_config(config, "config.json", pair_head=True)


@pytest.mark.parametrize(
    ("config", "chosen", "expected"),
    [
        ({"model_type": "gpt2"}, None, 0.1),
        ({"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, None, 0.0),
        ({"model_type": "gpt2", "attn_pdrop": 0.0}, 0.3, 0.3),
        ({"model_type": "bert", "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}, None, 0.2),
        ({"model_type": "megatron-bert", "attention_probs_dropout_prob": 0.2}, 0.0, 0.0),
        ({"model_type": "llama"}, None, 0.0),
        ({"model_type": "mistral", "attention_dropout": 0.1}, 0.1, 0.1),
    ],
)
def test_dropout_is_kept_or_chosen(config: dict[str, Any], chosen: object, expected: float) -> None:
    _, settings = settings_from_config(config, "config.json", pair_head=True, dropout=chosen)
    assert settings.to_dict()["dropout"] == expected


@pytest.mark.parametrize(
    "where",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_base_of_the_angles_is_read_where_any_transformers_writes_it(family: str, where: dict[str, Any]) -> None:
    _, settings = settings_from_config({"model_type": family} | where, "config.json", pair_head=False)
    assert settings.to_dict()["rotary_base"] == 5e5


@pytest.mark.parametrize(
    ("config", "setting", "expected"),
    [
        ({"model_type": "gpt2", "num_attention_heads": 8, "n_head": 4}, "num_heads", 8),
        ({"model_type": "gpt2", "max_position_embeddings": 40}, "seq_len", 40),
        ({"model_type": "llama", "sliding_window": 40}, "window", None),
        ({"model_type": "mistral", "sliding_window": 40, "use_sliding_window": False}, "window", 40),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 32}, "window", None),
        ({"model_type": "mistral", "layer_types": ["sliding_attention"] * 80, "num_hidden_layers": 80}, "window", 4096),
        ({"model_type": "mistral", "layer_types": None}, "window", 4096),
        (
            {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"rope_type": "default"},
             "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}},
            "rotary_base", 5e5,
        ),
        (
            {"model_type": "llama", "rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 7e5}},
            "rotary_base", 1e4,
        ),
        ({"model_type": "llama", "rope_scaling": {}, "rope_parameters": {"rope_theta": 7e5}}, "rotary_base", 7e5),
    ],
)  # fmt: skip
def test_a_setting_is_what_transformers_takes_for_it(config: dict[str, Any], setting: str, expected: object) -> None:
    _, settings = settings_from_config(config, "config.json", pair_head=False)
    assert settings.to_dict()[setting] == expected


def test_keys_that_decide_nothing_are_named() -> None:
    assert ignored_keys({"model_type": "llama", "sliding_window": 4, "hidden_size": 8, "_note": 1}) == {
        "_note": "it is kept for an export", "sliding_window": "a LLaMA has no window in transformers",
    }  # fmt: skip
    assert ignored_keys({"model_type": "llama", "sliding_window": None}) == {}
    assert ignored_keys({"model_type": "llama", "rope_scaling": {"type": "default"}, "rope_parameters": {"a": 1}}) == {
        "rope_parameters": "transformers reads rope_scaling in its place"
    }
    assert ignored_keys({"model_type": "llama", "rope_scaling": None, "rope_parameters": {"rope_theta": 1}}) == {}
    assert ignored_keys({"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"]}) == {}
    assert "layer_types" in ignored_keys({"model_type": "llama", "layer_types": ["sliding_attention"]})
    assert ignored_keys({"model_type": "gpt2", "num_attention_heads": 2}) == {}


@pytest.mark.parametrize(
    ("word", "activation"),
    [("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_fast", "gelu_tanh")],
)
@pytest.mark.parametrize(("family", "key"), [("gpt2", "activation_function"), ("bert", "hidden_act")])
def test_a_gelu_is_known_by_each_of_its_names(family: str, key: str, word: str, activation: str) -> None:
    _, settings = settings_from_config({"model_type": family, key: word}, "config.json", pair_head=False)
    assert settings.to_dict()["activation"] == activation


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "bert", "megatron-bert"])
def test_a_key_that_would_change_the_model_passes_where_its_value_changes_nothing(family: str) -> None:
    harmless: dict[str, Any] = {
        "logits_scaling": 1.0, "residual_multiplier": 1, "query_pre_attn_scalar": None, "use_qk_norm": False,
        "rope_interleaved": False, "no_rope_layers": [], "pruned_heads": {}, "do_layer_norm_before": True,
    }  # fmt: skip
    config = {"model_type": family} | harmless
    found = settings_from_config(config, "config.json", pair_head=True, dropout=0.0)
    assert found == settings_from_config({"model_type": family}, "config.json", pair_head=True, dropout=0.0)
    assert set(ignored_keys(config).values()) == {"it changes nothing at this value"}


@pytest.mark.parametrize(
    ("config", "window", "pattern"),
    [
        ({}, None, None),
        ({"use_sliding_window": False, "max_window_layers": 0}, None, None),
        ({"use_sliding_window": True, "max_window_layers": 1}, 4096, "fww"),
        ({"use_sliding_window": True, "max_window_layers": 0}, 4096, None),
        ({"use_sliding_window": True, "max_window_layers": 3}, None, None),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, None, None),
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, 9, "wf"
        ),
    ],
)  # fmt: skip
def test_the_layers_of_a_qwen_have_their_windows(
    config: dict[str, Any], window: int | None, pattern: str | None
) -> None:
    whole = {"model_type": "qwen3", "num_hidden_layers": 3, **config}
    _, settings = settings_from_config(whole, "config.json", pair_head=False)
    assert isinstance(settings, GPTSettings)
    assert (settings.window, settings.layer_pattern) == (window, pattern)


def test_a_phi_3_that_trains_on_short_texts_has_its_longest_text_and_factor() -> None:
    factors = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    settings = llama(
        seq_len=8, num_kv_heads=None, activation="relu", rotary_scaling="longrope", rotary_factor=4.0,
        rotary_original_len=16, rotary_short_factors=factors, rotary_long_factors=factors,
    )  # fmt: skip
    config = hf_config(settings, {}, "float32", "phi3")
    assert (config["max_position_embeddings"], config["original_max_position_embeddings"]) == (64, 16)
