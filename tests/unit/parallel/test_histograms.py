"""What is counted of a tensor is what its numbers say, one by one."""

from __future__ import annotations

import math

import torch

from lmtrain.observe.histogram import EDGES
from lmtrain.parallel.histograms import _count


def test_counts_ends_and_sums() -> None:
    numbers = torch.tensor([-3.0, 0.0, 1e-20, 0.5, 0.5, 2.0, 1e9])
    counts = torch.zeros(len(EDGES) + 1, dtype=torch.int64)
    sums, ends = torch.zeros(2, dtype=torch.float64), torch.full((2,), -math.inf, dtype=torch.float64)
    for some in (numbers[:3], numbers[3:3], numbers[3:]):
        _count(some, torch.tensor(EDGES), counts, sums, ends)
    expected = [0] * len(counts)
    for number in numbers.tolist():
        expected[sum(edge < number for edge in torch.tensor(EDGES).tolist())] += 1
    assert counts.tolist() == expected
    assert ends.tolist() == [3.0, 1e9]
    assert sums.tolist() == [numbers.double().sum().item(), numbers.double().square().sum().item()]
