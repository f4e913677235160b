"""The checkpoint settings: sizes, defaults and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.config.build import build_settings
from lmtrain.errors import SettingsError


def test_human_sizes_and_defaults() -> None:
    settings = build_settings(CheckpointSettings, {"interval_steps": "2k"}, "checkpoint")
    assert settings == CheckpointSettings(interval_steps=2000, keep_last=2, asynchronous=True, resume="auto")
    assert build_settings(CheckpointSettings, settings.to_dict()) == settings


@pytest.mark.parametrize("wrong", [{"interval_steps": -1}, {"keep_last": 0}, {"resume": " "}])
def test_wrong_values_are_refused_with_their_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"checkpoint.{next(iter(wrong))}="):
        build_settings(CheckpointSettings, wrong, "checkpoint")
