"""Histograms count a tensor's numbers one by one, and those of all ranks together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lmtrain.runfolder.tensorboard_metric_names import EDGES
from lmtrain.train.record.metrics_writer import _add_to_histogram, build_histograms
from tests.layouts.workers import Pool
from tests.unit.parallel.spread import build, step_of


def test_counts_ends_and_sums() -> None:
    numbers = torch.tensor([-3.0, 0.0, 1e-20, 0.5, 0.5, 2.0, 1e9])
    counts = torch.zeros(len(EDGES) + 1, dtype=torch.int64)
    sums, ends = torch.zeros(2, dtype=torch.float64), torch.full((2,), -math.inf, dtype=torch.float64)
    for some in (numbers[:3], numbers[3:3], numbers[3:]):
        _add_to_histogram(some, torch.tensor(EDGES), counts, sums, ends)
    expected = [0] * len(counts)
    for number in numbers.tolist():
        expected[sum(edge < number for edge in torch.tensor(EDGES).tolist())] += 1
    assert counts.tolist() == expected
    assert ends.tolist() == [3.0, 1e9]
    assert sums.tolist() == [numbers.double().sum().item(), numbers.double().square().sum().item()]


def counted(parallel: dict[str, Any]) -> dict[str, list[int]]:
    """Return the counts of each weight's and gradient's buckets, as this rank gets them."""
    built = build(parallel)
    built.forward_backward(step_of(0, built.mesh.layout, 2, built.mesh.dp.index))
    built.finish_gradients(None)
    return {name: list(one.counts) for name, one in build_histograms(built).items()}


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"tp": 2}], ids=str)
def test_every_rank_knows_all_weights_and_gradients(pool: Pool, parallel: dict[str, int]) -> None:
    (one,) = pool.run(f"{__name__}:counted", 1, {"parallel": {}})
    for found in pool.run(f"{__name__}:counted", 2, {"parallel": parallel}):
        assert {name: sum(counts) for name, counts in found.items()} == {n: sum(counts) for n, counts in one.items()}
        assert all(found[name] == counts for name, counts in one.items() if name.startswith("weights"))
