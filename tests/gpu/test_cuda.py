"""On a GPU: the same run as on the CPU, in every precision, compiled or not, and resumed. Skips itself without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def losses(toy: Toy, folder: Path, *extra: str, **settings: Any) -> list[float]:
    lmtrain("pretrain", *toy.settings(folder, **settings), *extra)
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 2e-2), ("fp16", 2e-2)])
def test_a_gpu_follows_the_cpu(toy: Toy, tmp_path: Path, precision: str, tolerance: float, compiled: str) -> None:
    expected = losses(toy, tmp_path / "cpu", compute__device="cpu")
    found = losses(toy, tmp_path / "gpu", f"precision={precision}", compute__device="cuda", compute__compile=compiled)
    assert found == pytest.approx(expected, rel=tolerance)


def test_a_resumed_run_equals_an_unbroken_one(toy: Toy, tmp_path: Path) -> None:
    settings = {"compute__device": "cuda", "compute__deterministic": "true", "model__dropout": 0.1}
    whole = losses(toy, tmp_path / "whole", **settings)
    part = tmp_path / "whole/checkpoints/step_00000008"
    assert losses(toy, tmp_path / "rest", checkpoint__resume=part, **settings) == whole[8:]


def test_a_rank_that_was_forked_computes_as_one_that_was_started(toy: Toy, tmp_path: Path) -> None:
    """Imports of the server must not touch CUDA: a driver that was asked before a fork cannot be used after it."""
    found = []
    for fork in ("1", "0"):
        folder = tmp_path / fork
        typed = toy.settings(folder, compute__device="cuda", compute__deterministic="true")
        process = start("pretrain", *typed, "--max-restarts", 1, "--debug", env={"LMTRAIN_FORK": fork})
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert ("Each rank starts and imports by itself" in output) == (fork == "0"), output
        found.append([row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"])
    assert found[0] == found[1]
