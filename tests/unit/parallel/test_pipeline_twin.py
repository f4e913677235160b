"""Our executor beside torch.distributed.pipelining: the same stages and microbatches, the same losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.layouts.workers import Pool
from tests.marks import wide
from tests.unit.parallel.twins import STAGES

# because: torch's interleaved schedules want the rounds of microbatches equally long
CASES: list[Any] = [
    ("1f1b", 1, 9), ("interleaved", 2, 3), ("zb_h1", 1, 8), ("zb_v", 2, 5),
    *wide(("gpipe", 1, 4), ("gpipe", 1, 9), ("1f1b", 1, 4), ("interleaved", 2, 4), ("zb_v", 2, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "vp", "count"), CASES)
def test_losses_and_gradients_are_those_of_torch(pool: Pool, schedule: str, vp: int, count: int) -> None:
    arguments = {"schedule": schedule, "vp": vp, "count": count}
    ranks = pool.run("tests.unit.parallel.twins:both", STAGES // vp, arguments)
    apart = {name: far for rank in ranks for name, far in rank["apart"].items()}
    assert len(apart) == 4 * STAGES
    assert max(apart.values()) <= 1e-6, apart
    ours, torchs = ([loss for rank in ranks for loss in rank[whose]] for whose in ("ours", "torch's"))
    assert len(ours) == count
    assert ours == pytest.approx(torchs, rel=1e-6)
