"""A run killed at any instant and started again gives, bit for bit, what an unbroken run gives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start

EXACT = ("loss", "grad_norm", "lr", "samples", "tokens", "samples_hash")
STEPS = 60
SETTINGS: dict[str, Any] = {"train__steps": STEPS, "checkpoint__interval_steps": 3, "model__dropout": 0.1}
POINTS = (
    "ckpt.begin", "ckpt.mid_write", "ckpt.before_manifest", "ckpt.before_rename", "ckpt.after_rename", "ckpt.prune"
)  # fmt: skip


def curve(folder: Path) -> list[tuple[Any, ...]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [tuple(row[key] for key in EXACT) for row in rows]


def weights(folder: Path) -> dict[str, str]:
    """The root hash of each tensor file of the last checkpoint: equal hashes, equal bits of weights and optimizer."""
    manifest = json.loads((folder / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").read_text())
    assert manifest["state"]["step"] == STEPS
    return {name: entry["root"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def unbroken(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    lmtrain("pretrain", *toy.settings(folder, **SETTINGS))
    return folder


def kill_at_line(toy: Toy, folder: Path, line: int) -> bool:
    """SIGKILL the run after it has printed so many lines of steps; whether it was still running."""
    process = start("pretrain", *toy.settings(folder, **SETTINGS), fresh=True)
    assert process.stdout is not None
    seen = 0
    for text in process.stdout:
        seen += text.startswith("step ")
        if seen == line:
            process.kill()
            break
    process.communicate()
    return process.returncode == -9


def kill_in_checkpoint(toy: Toy, folder: Path, point: str, count: int) -> bool:
    fault = {"LMTRAIN_FAULT": f"kill:point={point}:count={count}", "LMTRAIN_ALLOW_FAULTS": "1"}
    process = start("pretrain", *toy.settings(folder, **SETTINGS), env=fault)
    process.communicate()
    return process.returncode == -9


def finish_and_compare(toy: Toy, folder: Path, unbroken: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(folder, **SETTINGS))
    assert f"done: {STEPS} steps" in output
    assert curve(folder) == curve(unbroken)
    assert weights(folder) == weights(unbroken)
    assert not list((folder / "checkpoints").glob("*.tmp*"))


def test_killed_while_saving(toy: Toy, unbroken: Path, tmp_path: Path) -> None:
    assert kill_in_checkpoint(toy, tmp_path / "run", "ckpt.mid_write", 3)
    finish_and_compare(toy, tmp_path / "run", unbroken)


@pytest.mark.wide
def test_killed_while_stepping_and_while_saving(toy: Toy, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert kill_at_line(toy, folder, 8)
    assert kill_in_checkpoint(toy, folder, "ckpt.mid_write", 3)
    assert kill_in_checkpoint(toy, folder, "ckpt.before_rename", 2)
    finish_and_compare(toy, folder, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_kills(toy: Toy, unbroken: Path, tmp_path: Path, seed: int) -> None:
    rng, folder, kills = random.Random(seed), tmp_path / "run", 0
    while kills < 20:
        (folder / "starts.json").unlink(missing_ok=True)  # because: kills can strike three times before a checkpoint
        # a kill in the middle of a checkpoint, or at whatever the process is doing once a line has come out
        if rng.random() < 0.4:
            kills += kill_in_checkpoint(toy, folder, rng.choice(POINTS), rng.choice((1, 2)))
        else:
            kills += kill_at_line(toy, folder, rng.randint(1, 6))
        done = (folder / "checkpoints" / f"step_{STEPS:08d}").is_dir()
        if done:  # begin again, so that all kills strike a run under way
            finish_and_compare(toy, folder, unbroken)
            folder = tmp_path / f"run{kills}"
    finish_and_compare(toy, folder, unbroken)
