"""How many checkpoints a run has on the disk at once."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import SettingsError


@pytest.mark.parametrize(
    ("interval", "every", "kept", "most"),
    [
        (10, None, (), 3), (10, None, (35,), 4), (10, None, (30, 60), 5), (10, 20, (20, 35, 60), 9), (0, None, (), 1),
        (0, None, (100,), 1), (0, None, (35,), 2), (0, None, (20, 35, 50, 100), 4),
    ],
)  # fmt: skip
def test_checkpoints_that_stay_count_once(interval: int, every: int | None, kept: tuple[int, ...], most: int) -> None:
    """A run of 100 steps, which saves every `interval` and the `kept` ones, never has more than is said.

    By default the newest two stay.
    """
    settings = CheckpointSettings(interval_steps=interval, interval_s=None, keep_every_steps=every)
    assert settings.num_on_disk(100, kept) == (min(3, most), most)
    saves = sorted({*kept, 100, *(range(interval, 100, interval) if interval else ())})
    on_disk: list[int] = []
    largest = 0
    for step in saves:
        on_disk.append(step)
        largest = max(largest, len(on_disk))
        on_disk = [s for s in on_disk if s in kept or s in on_disk[-2:] or (every and s % every == 0)]
    assert largest <= most


def test_all_keeps_every_checkpoint() -> None:
    settings = build_settings(CheckpointSettings, {"keep_last": "all", "interval_steps": 10, "interval_s": None})
    assert settings.num_on_disk(100) == (10, 10)
    assert settings.num_on_disk(100, (35,)) == (11, 11)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"keep_last": None}, "keep_last=null is not a whole number or all. Write checkpoint.keep_last=all."),
        ({"keep_last": "every"}, "keep_last=every is not a whole number or all. Give a whole number or all, such as all"),
        ({"keep_last": 0}, "keep_last=0 would keep no checkpoint. Use 2, so that a damaged newest one has"),
        ({"keep_last": "all", "keep_every_steps": 500}, "keep_every_steps=500 keeps nothing more, since keep_last=all"),
    ],
)  # fmt: skip
def test_who_may_mean_all_is_not_answered_with_two(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build_settings(CheckpointSettings, wrong, "checkpoint")
    assert says in str(caught.value)
    assert "all" in str(caught.value)
