"""Our model settings beside other programs' formats: settings that are built from a file's values, rules that keep a
decoder within what a format can say, and patterns of layers. Torch-free.

Called by both exchanges. Formats spell out what ours leave to defaults; imported settings are written as a user would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lmtrain.config.build_typed_settings import build_settings
from lmtrain.config.settings_base import show
from lmtrain.errors import CheckpointError, SettingsError
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings

# Settings that are sizes, or that change nothing in a finished model.
_SIZES = {
    "num_layers", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width", "vocab_size", "vocab_multiple",
    "seq_len", "num_positions", "norm_eps", "dropout", "init_std", "z_loss",
}  # fmt: skip


def build_imported_settings(values: Mapping[str, Any], where: object, way_out: str) -> ModelSettings:
    """Build the settings of an imported model from `values` (setting key -> value). Raise CheckpointError if they are
    invalid; its message begins with `where`, the imported file, and ends with `way_out`, what the user can do.
    """
    try:
        # because: mypy asks for a concrete class where build_settings takes the base of a choice
        return drop_default_sizes(build_settings(ModelSettings, values, "model"))  # type: ignore[type-abstract]
    except SettingsError as error:
        raise CheckpointError(f"{where} describes a model with invalid settings: {error} {way_out}") from error


def drop_default_sizes(settings: ModelSettings) -> ModelSettings:
    """Return settings of the same model in which ffn_width and head_width are None if they equal the sizes that None
    stands for.
    """
    assert isinstance(settings, (GPTSettings, BertSettings))
    without_ffn = replace(settings, ffn_width=None)
    settings = without_ffn if without_ffn.ffn == settings.ffn else settings
    if isinstance(settings, GPTSettings) and settings.head * settings.num_heads == settings.width:
        return replace(settings, head_width=None)
    return settings


def word_rules(s: GPTSettings, free: Collection[str] = (), **required: object) -> list[tuple[bool, str]]:
    """Return a rule, (whether it holds, the message if it does not), for each setting of `s` that changes what a
    decoder computes, except sizes and the keys in `free`. The setting must have the value given for its key in
    `required`, where a tuple lists several allowed values; without one it must have its default.
    """
    rules = []
    for field in dataclasses.fields(s):
        if field.name in _SIZES or field.name in free:
            continue
        value, wanted = getattr(s, field.name), required.get(field.name, field.default)
        if field.name == "norm_bias":
            value, wanted = s.has_norm_bias, required.get("norm_bias", s.norm == "layernorm")
        choices = wanted if isinstance(wanted, tuple) else (wanted,)
        rules.append((
            value in choices,
            f"model.{field.name}={show(value)} would have to be {' or '.join(map(show, choices))}",
        ))  # fmt: skip
    return rules


def shortest_pattern(letters: str) -> str:
    """Return the shortest beginning of `letters`, which has one letter a layer, that yields all of `letters` when it is
    repeated (the last time perhaps in part); an empty text for an empty one.
    """
    num = len(letters)
    return next((letters[:n] for n in range(1, num + 1) if (letters[:n] * (num // n + 1))[:num] == letters), "")
