"""A model cut into stages gives the losses, norms, gradients and weights of one process, under every schedule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.layouts.workers import Pool
from tests.unit.parallel.test_layouts import UNTIED, check, one_process, run

DEEP = {"num_layers": 5}
CASES: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    ("gpipe", {"pp": 2, "schedule": "gpipe"}, 4, {}),
    ("1f1b", {"pp": 2}, 4, {}),
    ("1f1b, fewer microbatches than stages", {"pp": 4}, 2, {}),
    ("1f1b, uneven", {"pp": 3, "balance": "cost"}, 8, {}),
    ("interleaved", {"pp": 2, "vp": 2, "schedule": "interleaved"}, 4, {}),
    ("interleaved, tp", {"pp": 2, "vp": 2, "tp": 2, "schedule": "interleaved"}, 4, UNTIED),
    ("zb_h1", {"pp": 2, "schedule": "zb_h1"}, 4, {}),
    ("zb_v", {"pp": 2, "vp": 2, "schedule": "zb_v"}, 4, {}),
    ("zb_v, tp, zero 2", {"pp": 2, "vp": 2, "tp": 2, "dp_shard": 2, "zero": 2, "schedule": "zb_v"}, 4, {}),
    ("zb_h1, replicas", {"pp": 2, "dp_replicate": 2, "zero": 0, "schedule": "zb_h1"}, 4, {}),
    ("1f1b, zero 1", {"pp": 2, "dp_shard": 2, "zero": 1}, 4, {}),
    ("1f1b, zero 3, tp", {"pp": 2, "dp_shard": 2, "tp": 2, "zero": 3}, 4, {}),
    ("1f1b, tp, whole sequence", {"pp": 2, "tp": 2, "sequence_parallel": False}, 4, {}),
]


# because: `make test` has the schedules in tests/layouts, and beside torch's in test_pipeline_twin.py
@pytest.mark.wide
@pytest.mark.parametrize(("name", "parallel", "count", "model"), [pytest.param(*case, id=case[0]) for case in CASES])
def test_fp32_equals_one_process(
    pool: Pool, name: str, parallel: dict[str, Any], count: int, model: dict[str, Any]
) -> None:
    model = DEEP | model
    check(run(pool, parallel, count=count, model=model), one_process(pool, count=count, model=model), 1e-5)
