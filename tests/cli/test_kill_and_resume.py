"""A run killed at any instant and started again gives, bit for bit, what an unbroken run gives."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start

EXACT = ("loss", "grad_norm", "lr", "samples", "tokens", "samples_hash")
SHORT, LONG = 12, 60  # steps
POINTS = (
    "ckpt.begin", "ckpt.mid_write", "ckpt.before_manifest", "ckpt.before_rename", "ckpt.after_rename", "ckpt.prune"
)  # fmt: skip


def settings(toy: Toy, folder: Path, steps: int) -> list[str]:
    return toy.settings(
        folder, train__steps=steps, checkpoint__interval_steps=3, checkpoint__ema__decay=0.9, model__dropout=0.1
    )


def curve(folder: Path, steps: int) -> list[tuple[Any, ...]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [tuple(row[key] for key in EXACT) for row in rows]


def weights(folder: Path, steps: int) -> dict[str, str]:
    """The root hash of each tensor file of the last checkpoint: equal hashes, equal bits of weights, of their average
    and of the optimizer.
    """
    manifest = json.loads((folder / "checkpoints" / f"step_{steps:08d}" / "manifest.json").read_text())
    assert manifest["state"]["step"] == steps
    return {name: entry["root"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def unbroken(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A run of so many steps that nothing has disturbed."""

    @cache
    def made(steps: int) -> Path:
        folder = tmp_path_factory.mktemp("unbroken") / "run"
        lmtrain("pretrain", *settings(toy, folder, steps))
        return folder

    return made


def kill_at_line(words: list[str], line: int) -> bool:
    """SIGKILL the run after it has printed so many lines of steps; whether it was still running."""
    process = start("pretrain", *words, fresh=True)
    assert process.stdout is not None
    seen = 0
    for text in process.stdout:
        seen += text.startswith("step ")
        if seen == line:
            process.kill()
            break
    process.communicate()
    return process.returncode == -9


def kill_in_checkpoint(words: list[str], point: str, count: int, *, fresh: bool = False) -> bool:
    fault = {"LMTRAIN_FAULT": f"kill:point={point}:count={count}", "LMTRAIN_ALLOW_FAULTS": "1"}
    process = start("pretrain", *words, env=fault, fresh=fresh)
    process.communicate()
    return process.returncode == -9


def finish_and_compare(words: list[str], folder: Path, unbroken: Path, steps: int) -> None:
    output = lmtrain("pretrain", *words)
    assert f"done: {steps} steps" in output
    assert curve(folder, steps) == curve(unbroken, steps)
    assert weights(folder, steps) == weights(unbroken, steps)
    assert not list((folder / "checkpoints").glob("*.tmp*"))


def test_killed_while_saving(toy: Toy, unbroken: Callable[[int], Path], tmp_path: Path) -> None:
    words = settings(toy, tmp_path / "run", SHORT)
    assert kill_in_checkpoint(words, "ckpt.mid_write", 3, fresh=True)  # because: one start alone needs no server
    finish_and_compare(words, tmp_path / "run", unbroken(SHORT), SHORT)


@pytest.mark.wide
def test_killed_while_stepping_and_while_saving(toy: Toy, unbroken: Callable[[int], Path], tmp_path: Path) -> None:
    words, steps = settings(toy, tmp_path / "run", 2 * SHORT), 2 * SHORT
    assert kill_at_line(words, 8)
    assert kill_in_checkpoint(words, "ckpt.mid_write", 3)
    assert kill_in_checkpoint(words, "ckpt.before_rename", 2)
    finish_and_compare(words, tmp_path / "run", unbroken(steps), steps)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_kills(toy: Toy, unbroken: Callable[[int], Path], tmp_path: Path, seed: int) -> None:
    rng, folder, kills = random.Random(seed), tmp_path / "run", 0
    while kills < 20:
        (folder / "starts.json").unlink(missing_ok=True)  # because: kills can strike three times before a checkpoint
        words = settings(toy, folder, LONG)
        # a kill in the middle of a checkpoint, or at whatever the process is doing once a line has come out
        if rng.random() < 0.4:
            kills += kill_in_checkpoint(words, rng.choice(POINTS), rng.choice((1, 2)))
        else:
            kills += kill_at_line(words, rng.randint(1, 6))
        done = (folder / "checkpoints" / f"step_{LONG:08d}").is_dir()
        if done:  # begin again, so that all kills strike a run under way
            finish_and_compare(words, folder, unbroken(LONG), LONG)
            folder = tmp_path / f"run{kills}"
    finish_and_compare(settings(toy, folder, LONG), folder, unbroken(LONG), LONG)
