"""One run, whose machines die and are replaced by others: its layout changes at checkpoints, its curve does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start

# because: 8 layers are one for each of 4 x 2 stages, and 8 samples one for each microbatch of these
SIZES: dict[str, Any] = {
    "model__num_layers": 8, "model__num_heads": 4, "train__global_batch": 8, "train__micro_batch": 1,
    "train__steps": 20, "checkpoint__interval_steps": 5, "checkpoint__asynchronous": "false",
}  # fmt: skip
LEGS: list[dict[str, Any]] = [
    {},
    {"pp": 2, "tp": 2, "dp_shard": 2},
    {"tp": 4},
    {"pp": 4, "vp": 2, "schedule": "interleaved"},
]
MOST_APART = 1e-5  # relative, at each step


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


def leg(number: int, layout: dict[str, Any], settings: list[str]) -> str:
    """Train on this layout until a rank dies, just behind the next checkpoint; the last one comes to its end."""
    axes = [layout.get(axis, 1) for axis in ("pp", "dp_shard", "tp")]
    num_processes, last = axes[0] * axes[1] * axes[2], number == len(LEGS) - 1
    launcher = ["--nproc", num_processes] if num_processes > 1 else []
    parallel = [f"parallel.{key}={value}" for key, value in layout.items()]
    fault = f"kill:point=step:step={5 * (number + 1)}:rank={num_processes - 1}"
    env = {} if last else {"LMTRAIN_FAULT": fault, "LMTRAIN_ALLOW_FAULTS": "1"}
    process = start("pretrain", *launcher, *settings, *parallel, "parallel.timeout_s=120", env=env)
    output: str = process.communicate(timeout=900)[0]
    assert process.returncode == (0 if last else 76 if launcher else -9), output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_a_run_moves_through_four_layouts(kind: str, toy: Toy, sentences: Toy, tmp_path: Path) -> None:
    def settings(folder: Path) -> list[str]:
        if kind == "gpt":
            return toy.settings(folder, **SIZES)
        # because: at 3e-3 a spike of BERT's gradient can make a thousandth of a rounding error
        return ["model=bert_tiny", "data=masked", *sentences.settings(folder, **SIZES, optim__lr="1e-3")]

    lmtrain("pretrain", *settings(tmp_path / "unbroken"))
    for number, layout in enumerate(LEGS):
        output = leg(number, layout, settings(tmp_path / "run"))
        assert number == 0 or f"at step {5 * number}" in output
    ours, theirs = rows(tmp_path / "run"), rows(tmp_path / "unbroken")
    assert [row["step"] for row in ours] == list(range(1, 21))
    assert sorted({row["attempt"] for row in ours}) == [1, 2, 3, 4]
    for key in ("samples_hash", "samples", "tokens", "lr"):
        assert [row[key] for row in ours] == [row[key] for row in theirs]
    apart = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(ours, theirs, strict=True)]
    assert max(apart) <= MOST_APART
    assert sum(row["loss"] for row in ours[-5:]) / 5 < 0.98 * ours[0]["loss"]  # it learns
