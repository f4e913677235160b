"""Every word of a decoder's settings means what a plain decoder computes, and each changes what it computes."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.data.samples.causal_language_samples import document_positions
from lmtrain.errors import SettingsError
from lmtrain.models.gpt import GPT, build
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.layers.token_and_position_embedding import text_lengths_of
from lmtrain.parallel.inference_scores_and_logits import _pad_to_multiple
from tests.layouts.family_models import FAMILY_MODELS
from tests.unit.models.first_weights import start
from tests.unit.models.plain_decoder import Weights, plain_logits

# they change no logits, or only the shapes of weights
SIZES = {
    "num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width", "vocab_size", "vocab_multiple",
    "seq_len", "num_positions", "init_std", "dropout", "z_loss",
}  # fmt: skip
LENGTHS = (9, 12, 16)  # below an original length, equal to it and above; beyond every window


# because: of 3 layers a pattern of two letters is repeated, and not stretched
MODELS = {name: replace(model, num_layers=3) for name, model in FAMILY_MODELS.items()}


def hot(settings: GPTSettings) -> Weights:
    """Weights so large that every branch changes the logits."""
    draw = torch.Generator().manual_seed(0)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        numbers = torch.randn(shape, generator=draw, dtype=torch.float64)
        if len(shape) == 2:
            return numbers * (1.5 / math.sqrt(shape[1]))
        is_norm = name.endswith("norm.weight")
        return 0.2 * numbers + settings.norm_start if is_norm else 0.3 * numbers

    return {name: drawn(name, shape) for name, shape in settings.weights().items()}


def tokens(length: int) -> Tensor:
    return torch.randint(67, (2, length), generator=torch.Generator().manual_seed(1))


def apart(found: Tensor, right: Tensor) -> float:
    """Return the largest difference relative to the largest logit."""
    return float((found - right).abs().max() / right.abs().max())


def hot_model(settings: GPTSettings) -> GPT:
    model = build(settings).double()
    model.load_state_dict(dict(hot(settings)), strict=False)
    return model


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_its_words_say(name: str, length: int) -> None:
    settings, tokens_BT = MODELS[name], tokens(length)
    model = hot_model(settings)
    found = model.logits(model(Batch(tokens_BT, tokens_BT)))[..., : settings.shape.vocab_size]
    # because: rotary angles are in fp32 whatever the model is in
    assert apart(found, plain_logits(settings, hot(settings), tokens_BT)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_documents_that_share_a_row_are_computed_as_each_alone(name: str) -> None:
    """Of 40 tokens in rows of 20: documents shorter and longer than every original length, and as long."""
    settings, tokens_BT = MODELS[name], tokens(20)
    model = hot_model(settings)
    starts = {0: (0, 3, 16), 1: (0, 12)}
    rows, columns = (np.array(list(at)) for at in zip(*((0, 3), (0, 16), (1, 12)), strict=True))
    positions, documents = map(torch.from_numpy, document_positions(2, 20, rows, columns))
    together = model(Batch(tokens_BT, tokens_BT, positions, documents))
    for row, (begins, ends) in ((row, pair) for row, at in starts.items() for pair in pairwise((*at, 20))):
        own = tokens_BT[row : row + 1, begins:ends]
        assert apart(together[row : row + 1, begins:ends], model(Batch(own, own))) < 1e-5


@pytest.mark.parametrize("multiple", [1, 5, 7])
def test_the_length_of_a_text_does_not_depend_on_padding(multiple: int) -> None:
    def lengths(batch: Batch) -> list[list[int]]:
        found = text_lengths_of(_pad_to_multiple(batch, multiple))
        return found.expand(2, -1).tolist() if isinstance(found, Tensor) else [[found]] * 2

    rows = torch.zeros(2, 6, dtype=torch.int64)
    real = torch.arange(6) < torch.tensor([[6], [4]])
    assert [row[0] for row in lengths(Batch(rows, rows))] == [6, 6]
    assert [row[0] for row in lengths(Batch(rows, rows, not_padding_BT=real))] == [6, 4]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 0, 0]])
    assert [row[:6] for row in lengths(Batch(rows, rows, positions))] == [[4, 4, 4, 4, 2, 2], [1, 3, 3, 3, 1, 1]]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_later_stage_computes_the_kinds_of_its_layers(name: str) -> None:
    whole, first, last = (hot_model(MODELS[name]) for _ in range(3))
    first.cut(range(1), first=True, last=False)
    last.cut(range(1, 3), first=False, last=True)
    batch = Batch(tokens(16), tokens(16))
    assert torch.equal(last(batch, first(batch)), whole(batch))


@torch.no_grad()
def test_capped_logits_of_padding_stay_minus_infinity() -> None:
    settings = replace(MODELS["gemma"], vocab_multiple=8)
    model = hot_model(settings)
    logits = model.logits(model(Batch(tokens(9), tokens(9))))
    assert logits[..., :67].abs().max() < 3.0
    assert (logits[..., 67:] == -math.inf).all()


@torch.no_grad()
def test_norms_whose_weights_are_added_to_1_start_as_those_whose_weights_start_at_1() -> None:
    settings = MODELS["gemma"]
    from_zero, ones = build(settings), build(replace(settings, norm_weight="ones"))
    batch = Batch(tokens(9), tokens(9))
    for model in (from_zero, ones):
        start(model, 1)
    assert apart(from_zero(batch), ones(batch)) < 1e-6


def test_every_word_of_these_models_changes_the_logits() -> None:
    """So the test above would notice one that is not followed. A word that others need, or that decides which weights
    there are, is left as it is."""
    tokens_BT, unheard = tokens(LENGTHS[-1]), []
    for name, model in MODELS.items():
        weights = hot(model)
        right = plain_logits(model, weights, tokens_BT)
        for field in fields(model):
            if field.name in SIZES or getattr(model, field.name) == field.default:
                continue
            with suppress(SettingsError):
                without: Any = {field.name: field.default}
                usual = replace(model, **without)
                if usual.weights() == model.weights() and apart(plain_logits(usual, weights, tokens_BT), right) < 1e-4:
                    unheard.append(f"{name}: {field.name}")
    assert not unheard


def test_the_models_have_every_word_and_every_value_of_a_word() -> None:
    missing, hints = [], get_type_hints(GPTSettings)
    for field in fields(GPTSettings):
        if field.name not in SIZES:
            words = get_args(hints[field.name]) if get_origin(hints[field.name]) is Literal else ()
            values = {getattr(model, field.name) for model in FAMILY_MODELS.values()}
            missing += [field.name] * (values == {field.default})
            missing += [f"{field.name}={word}" for word in words if word not in values]
    assert not missing
