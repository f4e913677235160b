"""Every file of conf/model and of a plugin, found by itself: it makes settings, builds, and describes itself truly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.compose_run_settings import compose
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.layers_and_shards_of_ranks import Stage, parameter_names_of_stages
from lmtrain.spec import LanguageModel, Split
from lmtrain.train.run_config import RunConfig
from tests.contracts.plugin import choices, config_file

ALIASES = {"gpt2": "gpt2_small"}
LADDER = {  # millions of parameters in Hoffmann 2022, table A9
    "chinchilla_44m": 44, "chinchilla_74m": 74, "chinchilla_117m": 117, "chinchilla_175m": 175, "chinchilla_251m": 251,
    "chinchilla_425m": 425, "chinchilla_1b": 1018,
}  # fmt: skip
NAMES = [name for name in choices("model") if "\ndefaults:" not in config_file("model", name).read_text()]
VOCAB = 50257  # for the files that leave the vocabulary to the tokenizer
PUBLISHED = {
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama_7b": 6_738_415_616,
    "llama_13b": 13_015_864_320,
    "llama_33b": 32_528_943_616,
    "llama_65b": 65_285_660_672,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
}
EXACT = {  # presets whose first line has the number of parameters, taken from their release
    name: int(found[1].replace(",", ""))
    for name in choices("model")
    if (found := re.match(r"# .*?(\d{1,3}(?:,\d{3}){2,}) parameters", config_file("model", name).read_text()))
}
BERTS = {  # with both heads: transformers' BertForPreTraining
    "bert_base": 110_106_428,
    "bert_large": 336_226_108,
}
ROUNDED_BILLIONS = {
    "megatron_355m": 0.355, "megatron_2_5b": 2.5, "megatron_8_3b": 8.3, "high_flyer_3_8b": 3.8, "gpt3_175b": 174.6
}  # fmt: skip
ROUNDED_BERTS = {"bert_336m": 0.336, "bert_1_3b": 1.3, "bert_3_9b": 3.9}  # of Shoeybi 2019, to two digits


def made(data: Any) -> ModelSettings:
    return build_settings(ModelSettings, data, "model")  # type: ignore[type-abstract]


def values(name: str) -> dict[str, Any]:
    """Return the values in a preset's file, with those of the files that it builds upon."""
    data: Any = OmegaConf.to_container(OmegaConf.load(config_file("model", name)))
    bases = [values(base) for base in data.pop("defaults", ()) if base != "_self_"]
    return {key: value for part in [*bases, data] for key, value in part.items()}


@cache
def settings_of(name: str) -> Any:
    settings: Any = made(values(name))
    return settings if settings.shape.vocab_size else settings.with_vocab(VOCAB)


def built(settings: Any) -> Any:
    """A model without memory."""
    with torch.device("meta"):
        return settings.build()


@cache
def model_of(name: str) -> Any:
    return built(settings_of(name))


def test_files_are_found() -> None:
    named = {*PUBLISHED, *BERTS, *ROUNDED_BILLIONS, *ROUNDED_BERTS, *LADDER, *ALIASES, *EXACT}
    assert named | {"llama_1b", "gpt_tiny", "llama_tiny", "bert_tiny", "mean_mixer"} == set(choices("model"))


@pytest.mark.parametrize("name", NAMES)
def test_settings_go_round_and_every_key_is_explained(name: str) -> None:
    settings = settings_of(name)
    assert made(settings.to_dict()) == settings
    lines = config_file("model", name).read_text().splitlines()
    keys = {line.split(":")[0] for line in lines if not line.startswith("#")}
    assert keys <= set(settings.to_dict())
    assert all(line.startswith("#") or " # " in line for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_words_are_true(name: str) -> None:
    """Every cut names a parameter, sections add up to its rows, ties join equal shapes, every start is known."""
    model: LanguageModel = model_of(name)
    assert isinstance(model, nn.Module)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert set(model.cuts()) <= set(parameters)
    for parameter, cut in model.cuts().items():
        if cut.sections:
            assert cut.split is Split.COLUMN
            assert sum(cut.sections) == parameters[parameter].shape[0], parameter
        if cut.split is Split.ROW:
            assert parameters[parameter].ndim == 2, parameter
        if cut.split is Split.VOCAB:
            assert parameters[parameter].shape[0] == settings_of(name).padded_vocab_size
    for tie in model.ties():
        assert parameters[tie.first] is parameters[tie.second]
    assert set(model.starts()) == set(parameters)
    assert list(model.blocks) == [str(layer) for layer in range(model.shape.num_layers)]


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_of_a_block_is_cut(name: str) -> None:
    """A weight that all ranks hold whole is a vector; a matrix left whole would be memory that tp does not save."""
    model, cuts = model_of(name), model_of(name).cuts()
    for parameter, value in model.named_parameters():
        if parameter.startswith("blocks.") and value.ndim == 2:
            assert cuts[parameter].split in (Split.COLUMN, Split.ROW), parameter


@pytest.mark.parametrize("name", NAMES)
def test_shape_is_the_models(name: str) -> None:
    model, shape = model_of(name), settings_of(name).shape
    assert model.shape == shape
    matrices = sum(p.numel() for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2)
    assert matrices == shape.num_layers * shape.block_matrix_params


@pytest.mark.parametrize("name", NAMES)
def test_flops(name: str) -> None:
    """72 L h^2 (1 + s/(6h)) + 6 h V for GPT-2's shape, and never nothing."""
    settings = settings_of(name)
    shape = settings.shape
    assert shape.flops_per_token() > 0
    odd = ("num_kv_heads", "head_width", "ffn_width", "window")
    if all(getattr(settings, key, None) is None for key in odd) and not shape.gated:
        layers, h, s = shape.num_layers, shape.width, shape.seq_len
        expected = 72 * layers * h**2 * (1 + s / (6 * h)) + 6 * h * shape.vocab_size
        assert shape.flops_per_token() == pytest.approx(expected, rel=1e-12)


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", sorted(PUBLISHED | BERTS))
def test_exact_published_sizes(name: str) -> None:
    assert count(built(replace(settings_of(name), vocab_multiple=1))) == (PUBLISHED | BERTS)[name]


@pytest.mark.parametrize("name", EXACT)
def test_the_first_line_counts_every_parameter(name: str) -> None:
    assert settings_of(name).num_parameters == EXACT[name]


@pytest.mark.parametrize("name", LADDER)
def test_chinchillas_ladder_has_its_published_sizes(name: str) -> None:
    """The table counts 32,000 tokens, vectors of bias, and a matrix for relative positions in each layer."""
    settings: Any = compose(RunConfig, [f"model={name}", "data.path=x"]).model
    num_parameters = count(built(replace(settings, vocab_size=32000)))
    relative_positions = settings.num_layers * settings.width**2
    assert (num_parameters + relative_positions) / 1e6 == pytest.approx(LADDER[name], abs=0.7)
    tokens = re.search(r"train.tokens=([\d.]+)B", config_file("model", name).read_text())
    assert tokens
    assert float(tokens[1]) == pytest.approx(20 * num_parameters / 1e9, abs=0.06)


@pytest.mark.parametrize("name", ALIASES)
def test_another_name_gives_the_same_model(name: str) -> None:
    assert compose(RunConfig, [f"model={name}", "data.path=x"]).model == settings_of(ALIASES[name])


@pytest.mark.parametrize("name", sorted(ROUNDED_BILLIONS | ROUNDED_BERTS))
def test_rounded_published_sizes(name: str) -> None:
    billions = count(built(replace(settings_of(name), vocab_multiple=1))) / 1e9
    digits = 0.02 if name in ROUNDED_BERTS else 0.008
    assert billions == pytest.approx((ROUNDED_BILLIONS | ROUNDED_BERTS)[name], rel=digits)


@pytest.mark.parametrize("name", [name for name in EXACT if name.startswith("gemma")])
def test_gemmas_scales_are_those_of_its_release(name: str) -> None:
    """Embeddings are scaled in bf16. Scores are scaled by the width of a head, but in the two 27B models."""
    settings = settings_of(name)
    assert settings.embedding_scale == float(torch.tensor(settings.width**0.5).bfloat16())
    released = {"gemma2_27b": 144**-0.5, "gemma3_27b": 168**-0.5}
    assert settings.attention_scale == released.get(name)


def test_llama_1b_has_tinyllamas_size() -> None:
    assert count(built(replace(settings_of("llama_1b"), vocab_size=32000))) == 1_100_048_384


def short(name: str) -> Any:
    """Return the settings with three layers, which show names and stages of weights as well as all layers would."""
    settings = settings_of(name)
    num_layers = min(3, settings.shape.num_layers)
    pattern = getattr(settings, "layer_pattern", None)
    letters = {"layer_pattern": pattern[-num_layers:]} if pattern else {}
    return replace(settings, num_layers=num_layers, **letters)


def turned_over(settings: Any) -> Iterator[Any]:
    """Yield the settings as they are, then once for each option with that option turned over."""
    options = {key: value for key, value in settings.to_dict().items() if isinstance(value, bool)}
    assert options
    yield settings
    yield from (replace(settings, **{key: not value}) for key, value in options.items())


@pytest.mark.parametrize("name", ["gpt3_175b", "megatron_2_5b", "megatron_8_3b"])
def test_megatron_lms_models_have_rows_for_eight_equal_cuts(name: str) -> None:
    assert settings_of(name).padded_vocab_size == 51200


def test_berts_of_one_family_differ_in_size_alone() -> None:
    """Megatron-LM's have their norms before attention and MLP at every size, the first ones behind."""
    for family, order in ((list(ROUNDED_BERTS), "pre"), (["bert_base", "bert_large"], "post")):
        first, *others = (settings_of(name) for name in family)
        assert first.norm_order == order
        for one in others:
            assert replace(one, num_layers=first.num_layers, width=first.width, num_heads=first.num_heads) == first


@pytest.mark.parametrize("name", NAMES)
def test_settings_tell_every_weight_and_its_cut_before_torch_is_there(name: str) -> None:
    for turned in turned_over(short(name)):
        model = built(turned)
        assert turned.weights() == {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert turned.cuts().items() <= model.cuts().items()
        assert turned.cuts().keys() == turned.weights().keys()


@pytest.mark.parametrize("name", NAMES)
def test_stages_hold_what_the_settings_say(name: str) -> None:
    """Weights of three stages, by cutting the model and by asking its settings; a tied copy counts as the first."""
    settings = short(name)
    count, first_of = settings.shape.num_layers, {tie.second: tie.first for tie in settings.ties()}
    for layers, first, last in ((range(1), True, False), (range(1, 1), False, False), (range(1, count), False, True)):
        model = built(settings)
        model.cut(layers, first=first, last=last)
        held = {first_of.get(name, name) for name, _ in model.named_parameters(remove_duplicate=False)}
        assert held == set(parameter_names_of_stages(settings, [Stage(0, layers, first, last)]))
