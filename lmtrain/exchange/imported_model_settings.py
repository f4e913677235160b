"""Build a model's settings from the values that another program's files have for them, written as a user would.
Torch-free.

Called by the imports, whose formats spell out what ours leave to defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmtrain.config.settings_builder import build_settings
from lmtrain.errors import CheckpointError, SettingsError
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings


def build_imported_settings(values: Mapping[str, Any], where: object, way_out: str) -> ModelSettings:
    """Build the settings of an imported model from `values`, which are by setting key. Raise CheckpointError if no
    model has such settings; its message begins with `where`, the imported file, and ends with `way_out`.
    """
    try:
        # because: mypy asks for a concrete class where build_settings takes the base of a choice
        return drop_default_sizes(build_settings(ModelSettings, values, "model"))  # type: ignore[type-abstract]
    except SettingsError as error:
        raise CheckpointError(f"{where} describes a model with invalid settings: {error} {way_out}") from error


def drop_default_sizes(settings: ModelSettings) -> ModelSettings:
    """Return settings of the same model with None for ffn_width and head_width if these equal their defaults, as users
    leave them out.
    """
    assert isinstance(settings, (GPTSettings, BertSettings))
    without_ffn = replace(settings, ffn_width=None)
    settings = without_ffn if without_ffn.ffn == settings.ffn else settings
    if isinstance(settings, GPTSettings) and settings.head * settings.num_heads == settings.width:
        return replace(settings, head_width=None)
    return settings
