"""Any layout gives the losses, norms, gradients and weights of one process, and all ranks skip an overflow together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.layouts.workers import Pool
from tests.marks import wide
from tests.unit.parallel.spread import together

TRAIN = "tests.unit.parallel.spread:train"
LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 2, "zero": 0},
    {"dp_shard": 2, "zero": 1},
    {"dp_shard": 4, "zero": 2},
    {"dp_shard": 4, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 1},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 2, "dp_shard": 2, "zero": 3},
    {"tp": 2, "dp_replicate": 2, "sequence_parallel": False, "zero": 0},
]
# each axis and each zero once or, with another axis beside it, in tests/layouts
FEW = [LAYOUTS[number] for number in (2, 6, 7, 10)]
UNTIED = {"tied": False, "positions": "rotary", "head_width": 4, "norm": "rmsnorm", "bias": "none"}


def num_processes(parallel: dict[str, Any]) -> int:
    return int(np.prod([parallel.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "tp")]))


def words(parallel: dict[str, Any]) -> str:
    return "-".join(f"{key}{int(value)}" for key, value in parallel.items())


def run(pool: Pool, parallel: dict[str, Any], precision: str = "fp32", count: int = 1, **more: Any) -> dict[str, Any]:
    arguments = {"parallel": parallel, "precision": precision, "num_microbatches": count, "model": {}} | more
    ranks = pool.run(TRAIN, num_processes(parallel), arguments)
    for key in ("losses", "norms", "skipped", "scale"):
        assert all(rank[key] == ranks[0][key] for rank in ranks), key
    wholes = {key: together([rank[key] for rank in ranks]) for key in ("gradients", "weights")}
    return {**ranks[0], **wholes}


_known: dict[str, dict[str, Any]] = {}


def one_process(pool: Pool, precision: str = "fp32", count: int = 1, **more: Any) -> dict[str, Any]:
    """Return the result of one process, which is run once for all layouts that are compared with it."""
    key = repr((precision, count, more))
    if key not in _known:
        _known[key] = run(pool, {}, precision, count, **more)
    return _known[key]


def key_bias_aside(name: str, whole: Any) -> Any:
    """Its gradient is 0 but for noise, which AdamW turns into steps."""
    return np.delete(whole, slice(12, 18)) if name.endswith("qkv.bias") else whole


def check(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    for key in ("gradients", "weights"):
        assert found[key].keys() == expected[key].keys()
        for name, whole in expected[key].items():
            ours, theirs = (key_bias_aside(name, tensor) for tensor in (found[key][name], whole))
            assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs) + 1e-9, (key, name)


@pytest.mark.parametrize(
    ("parallel", "count"),
    [
        *((parallel, 4) for parallel in FEW),
        *wide(*((parallel, 4) for parallel in LAYOUTS if parallel not in FEW)),
        *wide(*((LAYOUTS[number], 1) for number in (2, 5, 9))),
    ],
    ids=lambda value: words(value) if isinstance(value, dict) else f"micro{value}",
)  # fmt: skip
def test_fp32_equals_one_process(pool: Pool, parallel: dict[str, Any], count: int) -> None:
    check(run(pool, parallel, count=count), one_process(pool, count=count), 1e-5)


@pytest.mark.parametrize("parallel", LAYOUTS[3:10:3], ids=words)
@pytest.mark.wide
def test_an_untied_llama_equals_one_process(pool: Pool, parallel: dict[str, Any]) -> None:
    check(run(pool, parallel, count=2, model=UNTIED), one_process(pool, count=2, model=UNTIED), 1e-5)


HALF_LAYOUTS = [LAYOUTS[0], LAYOUTS[2], LAYOUTS[5], LAYOUTS[9]]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("parallel", HALF_LAYOUTS, ids=words)
@pytest.mark.wide
def test_half_precision_is_as_near_to_fp32_as_one_process(pool: Pool, parallel: dict[str, Any], precision: str) -> None:
    exact, one, found = one_process(pool), one_process(pool, precision), run(pool, parallel, precision)
    assert found["skipped"] == one["skipped"] == [False, False, False]

    def error(outcome: dict[str, Any]) -> float:
        """Of the first gradient, all parameters together."""
        pairs = [(outcome["gradients"][name], whole) for name, whole in exact["gradients"].items()]
        flat = [np.concatenate([key_bias_aside("", one).ravel() for one in side]) for side in zip(*pairs, strict=True)]
        return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))

    assert 0 < error(found) < 2 * error(one)
    assert found["losses"] == pytest.approx(exact["losses"], rel=0.02)


@pytest.mark.parametrize("parallel", [LAYOUTS[0], LAYOUTS[9], *wide(LAYOUTS[2], LAYOUTS[5], LAYOUTS[7])], ids=words)
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: Pool, parallel: dict[str, Any]) -> None:
    last = num_processes(parallel) - 1
    found = run(pool, parallel, "fp16", 2, overflow_rank=last)
    assert found["skipped"] == [True, False, False]
    assert found["scale"] == 512.0
    assert not np.isfinite(found["norms"][0])
    assert np.isfinite(found["norms"][1:]).all()
    assert all(np.isfinite(whole).all() for whole in found["weights"].values())
