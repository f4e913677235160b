"""The digest of the first weights distinguishes two runs."""

from __future__ import annotations

from typing import Any

from lmtrain.train.record.metrics_writer import weights_digest
from tests.layouts.workers import Pool
from tests.unit.parallel.spread import build

# copies of all weights, of norms, and of the embedding that the last stage shares with the first
LAYOUTS: list[dict[str, Any]] = [{"dp_replicate": 2, "zero": 0}, {"tp": 2}, {"pp": 2}, {"dp_shard": 2, "zero": 3}]


def digests(layouts: list[dict[str, Any]], seed: int = 1) -> list[str]:
    return [weights_digest(build(layout, seed=seed)) for layout in layouts]


def test_the_same_weights_have_one_digest_at_any_layout_and_others_another(pool: Pool) -> None:
    (alone,) = digests([{}])
    assert pool.run(f"{__name__}:digests", 2, {"layouts": LAYOUTS}) == [[alone] * len(LAYOUTS)] * 2
    assert digests([{}], seed=2) != [alone]
