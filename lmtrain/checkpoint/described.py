"""What a checkpoint says that it is: its model, and the layout that it was saved from. Torch-free.

Called by whoever reads a checkpoint without a run's settings. What a checkpoint says is judged as settings are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmtrain.config.build import build_settings
from lmtrain.errors import CheckpointError, LmtrainError, SettingsError
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import ParallelSettings


def model_of(state: Mapping[str, Any], where: object) -> ModelSettings:
    """The model that a checkpoint says it is of."""
    try:
        return build_settings(ModelSettings, state.get("model"), "model")  # type: ignore[type-abstract]
    except LmtrainError as error:
        raise CheckpointError(f"{where} does not say what model it is of: {error}") from error


def layout_of(state: Mapping[str, Any]) -> ParallelSettings | None:
    """The settings of parallelism that a checkpoint was made with, where it says so in words that are still known."""
    settings = state.get("settings")
    found = settings.get("parallel") if isinstance(settings, dict) else None
    try:
        return build_settings(ParallelSettings, found, "parallel")
    except SettingsError:
        return None
