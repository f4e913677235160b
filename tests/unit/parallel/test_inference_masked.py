"""Masked tokens and pairs are scored once and alike on any layout, in batches of any size, padding included."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

from lmtrain.eval.score_targets import Scorer
from lmtrain.eval.windows import MaskedRequest
from lmtrain.models.bert_settings import BertSettings
from lmtrain.parallel.build_parallel_model import build_parallel
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings
from lmtrain.parallel.mesh import build_mesh
from lmtrain.placement.parallel_settings import ParallelSettings
from tests.layouts.workers import Pool
from tests.unit.parallel.test_layouts import num_processes

VOCAB, LENGTH = 13, 8
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2},
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero": 3},
    {"dp_replicate": 2, "tp": 2, "pp": 2, "zero": 1, "sequence_parallel": False},
    {"dp_replicate": 2, "tp": 2, "pp": 2, "zero": 1},
]


def requests(*, pairs: bool) -> list[MaskedRequest]:
    """Of every length, with any number of places, in an order that is not theirs."""
    draws = np.random.default_rng(4)
    found = []
    for number in draws.permutation(24).tolist():
        fed = draws.integers(0, VOCAB, 3 + number % (LENGTH - 2))
        places = np.sort(draws.permutation(len(fed))[: 1 + number % 3])
        segments = (np.arange(len(fed)) > len(fed) // 2).astype(np.int64)
        asked = draws.integers(0, 2, 1) if pairs else draws.integers(0, VOCAB, len(places))
        tokens = np.concatenate([fed, asked])
        found.append(MaskedRequest(tokens, len(asked), number, places=None if pairs else places, segments=segments))
    return found


def scored(parallel: dict[str, Any], norm_order: Literal["pre", "post"]) -> list[Any]:
    """For each size of batches, of each request its sum and its hits, masked and then pairs."""
    layout, cpu = ParallelSettings(**parallel), torch.device("cpu")
    settings = BertSettings(
        num_layers=2, width=16, num_heads=4, vocab_size=VOCAB, seq_len=LENGTH, init_std=0.3, norm_order=norm_order,
        vocab_multiple=1,
    )  # fmt: skip
    model = build_parallel(
        settings, Fp32Settings(), ComputeSettings(), cpu, seed=1, training=False,
        mesh=build_mesh(layout.layout, cpu, 60.0), parallel=layout,
    )  # fmt: skip
    found = []
    for size in (1, 7, 64):
        some = [one for pairs in (False, True) for one in Scorer(model, batch_size=size).score(requests(pairs=pairs))]
        found.append([[one.nll.tolist(), one.greedy.tolist()] for one in some])
    return found


@pytest.mark.wide
@pytest.mark.parametrize("norm_order", ["pre", "post"])
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_each_target_is_scored_once_and_as_on_one_process(
    pool: Pool, parallel: dict[str, Any], norm_order: str
) -> None:
    ((one, *_),) = pool.run(f"{__name__}:scored", 1, {"parallel": {}, "norm_order": norm_order})
    asked = [request.num_scored for pairs in (False, True) for request in requests(pairs=pairs)]
    expected = np.concatenate([nll for nll, _ in one])
    assert 0 < sum(sum(greedy) for _, greedy in one[24:]) < 24
    for found in pool.run(
        f"{__name__}:scored", num_processes(parallel), {"parallel": parallel, "norm_order": norm_order}
    ):
        for answers in found:
            assert [len(nll) for nll, _ in answers] == asked
            np.testing.assert_allclose(np.concatenate([nll for nll, _ in answers]), expected, rtol=0, atol=5e-6)
            assert sum(sum(nll) for nll, _ in answers) == pytest.approx(expected.sum(), rel=1e-6)
            assert [greedy for _, greedy in answers] == [greedy for _, greedy in one]
