"""What LAMB and Muon are given on any layout: sums that count each number once, whole matrices, and shards again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layouts.workers import Pool
from tests.marks import wide
from tests.unit.parallel.spread import build

LAYOUTS: list[dict[str, Any]] = [
    {}, {"tp": 2}, {"dp_shard": 4}, {"tp": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2},
]  # fmt: skip


def gather(parallel: dict[str, Any]) -> dict[str, Any]:
    """Whole weights' sizes and sums of squares as this rank is given them; and that cutting again gives the shards."""
    built = build(parallel)
    whole, names = built.whole_tensors, sorted(built.parameters)
    wholes = {name: whole.gather_sections(name, built.parameters[name].detach()) for name in names}
    for name in names:
        parameter = built.parameters[name]
        assert torch.equal(whole.local_shard(name, wholes[name])[: len(parameter)], parameter), name
    squares = torch.stack([built.parameters[name].detach().square().sum() for name in names])
    return {
        "rows": {name: [len(section) for section in sections] for name, sections in wholes.items()},
        "exact": {name: torch.cat(sections).double().square().sum().item() for name, sections in wholes.items()},
        "numbers": {name: torch.cat(sections)[:3].tolist() for name, sections in wholes.items()},
        "summed": dict(zip(names, whole.sum_over_shards(names, squares.unsqueeze(1)).flatten().tolist(), strict=True)),
    }


@pytest.mark.parametrize("parallel", [LAYOUTS[1], LAYOUTS[4], *wide(*LAYOUTS[2:4])], ids=str)
def test_every_rank_sees_the_whole_of_one_process(pool: Pool, parallel: dict[str, Any]) -> None:
    (one,) = pool.run(f"{__name__}:gather", 1, {"parallel": {}})
    count = torch.tensor([parallel.get(axis, 1) for axis in ("tp", "dp_shard", "dp_replicate")]).prod().item()
    for rank in pool.run(f"{__name__}:gather", int(count), {"parallel": parallel}):
        assert rank["rows"] == one["rows"]
        assert rank["numbers"] == one["numbers"]
        assert rank["exact"] == one["exact"]
        assert rank["summed"] == pytest.approx(one["exact"], rel=1e-5)


def test_fused_weights_are_given_apart() -> None:
    built = build({})
    qkv = built.parameters["blocks.0.attention.qkv.weight"]
    sections = built.whole_tensors.gather_sections("blocks.0.attention.qkv.weight", qkv)
    assert [len(section) for section in sections] == [12, 6, 6]
