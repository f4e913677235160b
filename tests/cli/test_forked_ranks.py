"""Ranks that are forked from a server, and ranks that are started by themselves, reach the same checkpoint bit for bit.

Twelve layouts, which between them have every axis, three schedules, dropout, fp16 with overflows, recomputation, BERT
and sequence parallelism switched off.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, start

STEPS = 3
_EXACT = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "samples_hash", "skipped", "loss_scale")
_DEGREES = ("tp", "pp", "dp_shard", "dp_replicate")
DROPOUT: dict[str, object] = {"model__dropout": 0.1}
FP16: dict[str, object] = {"precision": "fp16", "precision__initial_scale": 2**30}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, object]]] = {
    "tp": ({"tp": 2}, DROPOUT),
    "tp without sequence parallel": ({"tp": 2}, {"parallel__sequence_parallel": "false", **DROPOUT}),
    "zero 1, fp16": ({"dp_shard": 2}, {"parallel__zero": 1, **FP16}),
    "zero 2": ({"dp_shard": 2}, {"parallel__zero": 2, **DROPOUT}),
    "zero 3, recompute": ({"dp_shard": 2}, {"parallel__zero": 3, "recompute": "full"}),
    "pp, gpipe": ({"pp": 2}, {"parallel__schedule": "gpipe", **DROPOUT}),
    "pp, interleaved": ({"pp": 2}, {"parallel__schedule": "interleaved", "parallel__vp": 2, "model__num_layers": 4}),
    "replicas, bf16": ({"dp_replicate": 2}, {"precision": "bf16"}),
    "replicas of shards": ({"dp_replicate": 2, "dp_shard": 2}, {"parallel__zero": 3, **DROPOUT}),
    "tp and pp, fp16": ({"tp": 2, "pp": 2}, {"recompute": "full", **FP16}),
    "tp, pp and shards": ({"tp": 2, "pp": 2, "dp_shard": 2}, {"parallel__zero": 1, **DROPOUT}),
    "BERT, tp and shards": ({"tp": 2, "dp_shard": 2}, {"model": "bert_tiny", "data": "masked", **DROPOUT}),
}


def words(toy: Toy, folder: Path, degrees: dict[str, int], changes: dict[str, object]) -> list[object]:
    given: dict[str, object] = {
        "train__steps": STEPS, "train__global_batch": 8, "train__micro_batch": 1, "checkpoint__interval_steps": 1000,
        "schedule__warmup_steps": 1, "data__split": "[0.8,0.2]",
    }  # fmt: skip
    given |= {f"parallel__{name}": value for name, value in degrees.items()} | changes
    # because: a kind that is chosen comes before settings that its file would set
    groups = [f"{name}={given.pop(name)}" for name in ("model", "data", "precision", "recompute") if name in given]
    return ["pretrain", *groups, *toy.settings(folder, **given), "--nproc", math.prod(degrees.values())]


def reached(folder: Path) -> dict[str, Any]:
    """Return the rows of metrics, and the roots of the files of the only checkpoint."""
    rows = read_metrics(folder / "metrics.jsonl")
    (newest,) = (folder / "checkpoints").iterdir()
    files = json.loads((newest / "manifest.json").read_text())["files"]
    steps = [[row.get(key) for key in _EXACT] for row in rows if row["event"] == "step"]
    roots = {name: entry["root"] for name, entry in files.items() if name.endswith(".safetensors")}
    return {"steps": steps, "files": roots}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forked_ranks_reach_what_started_ranks_reach(
    toy: Toy, sentences: Toy, tmp_path: Path, layout: str
) -> None:
    degrees, changes = LAYOUTS[layout]
    found = {}
    for fork in ("1", "0"):
        folder = tmp_path / fork / "run"  # one name, which is part of what a checkpoint holds
        process = start(
            *words(sentences if "data" in changes else toy, folder, degrees, changes), "--debug",
            env={"LMTRAIN_FORK": fork, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
        )  # fmt: skip
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
        assert ("cannot be forked from one server: LMTRAIN_FORK=0 asks for it" in output) == (fork == "0")
        assert "cannot be forked from one server" not in output or fork == "0", output
        found[fork] = reached(folder)
    assert len(found["1"]["steps"]) == STEPS
    assert found["1"]["steps"] == found["0"]["steps"]
    assert found["1"]["files"] == found["0"]["files"]
    assert found["1"]["files"]
    if "fp16" in layout:
        assert any(step[_EXACT.index("skipped")] for step in found["1"]["steps"]), "the scale never changed"
