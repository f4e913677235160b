"""On a GPU: the same run as on the CPU, in every precision, compiled or not, and resumed. Skips itself without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain

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
