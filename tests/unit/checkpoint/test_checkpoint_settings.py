"""The checkpoint settings: sizes, defaults and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.config.settings_builder import build_settings
from lmtrain.errors import SettingsError


def test_human_sizes_and_defaults() -> None:
    settings = build_settings(CheckpointSettings, {"interval_steps": "2k"}, "checkpoint")
    assert settings == CheckpointSettings(interval_steps=2000, keep_last=2, asynchronous=True, resume="auto")
    assert build_settings(CheckpointSettings, settings.to_dict()) == settings


@pytest.mark.parametrize(
    "wrong",
    [{"interval_steps": -1}, {"keep_last": 0}, {"resume": " "}, {"keep_every_steps": 0}, {"keep_every_steps": 700}],
)
def test_wrong_values_are_refused_with_their_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"checkpoint.{next(iter(wrong))}="):
        build_settings(CheckpointSettings, wrong, "checkpoint")


def test_what_stays_for_good_must_be_saved_at_all() -> None:
    with pytest.raises(SettingsError, match=r"not a multiple of interval_steps=200, .* Use 800\."):
        CheckpointSettings(interval_steps=200, keep_every_steps=700)
    assert CheckpointSettings(interval_steps=200, keep_every_steps=800).keep_every_steps == 800


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"interval_steps": None, "keep_every_steps": 7}, "no step is saved. Add checkpoint.interval_steps=7, or"),
        ({"interval_steps": 0, "interval_s": None, "keep_every_steps": 7}, "the last step alone is saved. Add check"),
        ({"interval_steps": 0, "keep_every_steps": 7}, "hardly one of them is saved. Add checkpoint.interval_steps=7"),
        ({"interval_steps": None, "verify_after_save": True}, "nothing is saved. Use checkpoint.interval_steps=0 to"),
    ],
)
def test_what_is_for_saves_needs_saves(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        CheckpointSettings(**given)
