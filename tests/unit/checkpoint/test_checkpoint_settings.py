"""How many checkpoints a run has on the disk at once."""

from __future__ import annotations

import pytest

from lmtrain.checkpoint.checkpoint_settings import CheckpointSettings


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
