"""Every word of a decoder's settings means what a plain decoder computes, and each changes what it computes."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.errors import SettingsError
from lmtrain.models.gpt import build
from lmtrain.models.gpt_settings import GPTSettings
from tests.layouts.family_models import FAMILY_MODELS
from tests.unit.models.plain_decoder import Weights, plain_logits

# they change no logits, or only the shapes of weights
SIZES = {
    "num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width", "vocab_size", "vocab_multiple",
    "seq_len", "num_positions", "init_std", "dropout", "z_loss",
}  # fmt: skip
LENGTHS = (9, 16)  # on both sides of the original lengths, and beyond every window


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


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_model_computes_what_its_words_say(name: str, length: int) -> None:
    settings, weights, tokens_BT = FAMILY_MODELS[name], hot(FAMILY_MODELS[name]), tokens(length)
    model = build(settings).double()
    model.load_state_dict(dict(weights), strict=False)
    batch = Batch(tokens_BT, tokens_BT)
    with torch.no_grad():
        found = model.logits(model(batch))[..., : settings.shape.vocab_size]
    # because: rotary angles and scaled queries are in fp32 whatever the model is in
    assert apart(found, plain_logits(settings, weights, tokens_BT)) < 1e-5


def test_every_word_of_these_models_changes_the_logits() -> None:
    """So the test above would notice one that is not followed. A word that others need, or that decides which weights
    there are, is left as it is."""
    tokens_BT, unheard = tokens(LENGTHS[-1]), []
    for name, model in FAMILY_MODELS.items():
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
