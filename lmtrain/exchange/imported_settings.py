"""Settings of a model from the values that another program's files have for them, written as a user would. Torch-free.

Called by the imports, whose formats spell out what ours leave to defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmtrain.config.build import build_settings
from lmtrain.errors import CheckpointError, SettingsError
from lmtrain.models.bert_settings import BertSettings
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.models.model_settings import ModelSettings


def build_imported_settings(values: Mapping[str, Any], where: object, way_out: str) -> ModelSettings:
    """Return the model that settings describe; raise with `where` and `way_out` if there is no such model."""
    try:
        # because: mypy asks for a concrete class where build_settings takes the base of a choice
        return drop_default_sizes(build_settings(ModelSettings, values, "model"))  # type: ignore[type-abstract]
    except SettingsError as error:
        raise CheckpointError(f"{where} describes no model that works: {error} {way_out}") from error


def drop_default_sizes(settings: ModelSettings) -> ModelSettings:
    """Return the same model with null for each size that equals its default, as people write configs."""
    assert isinstance(settings, (GPTSettings, BertSettings))
    without_ffn = replace(settings, ffn_width=None)
    settings = without_ffn if without_ffn.ffn == settings.ffn else settings
    if isinstance(settings, GPTSettings) and settings.head * settings.num_heads == settings.width:
        return replace(settings, head_width=None)
    return settings
