"""Checkpoints of a run to merge, and a merge as the command line does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.checkpoint.merge.average_checkpoint_contents import COPIES, MergedContents
from lmtrain.checkpoint.merge.check_parents import check_parents, sort_parents
from lmtrain.checkpoint.merge.merge_coefficients import merge_weights
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.reshard.reshard_tensors import MERGE, WrittenCheckpoint, write_checkpoint
from lmtrain.checkpoint.reshard.write_target_files import Limits
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.checkpoint.layouts import MODELS, Arrays, draw, write

SMALL = GPTSettings(num_layers=1, width=8, num_heads=2, vocab_size=13, vocab_multiple=8, seq_len=4)


def write_step(run: Path, step: int, layout: str = "tp=1", model: GPTSettings = SMALL, **state: Any) -> Path:
    """A checkpoint of a run, with weights drawn for its step."""
    state = {"samples": 4 * step, "seed": 1, "optimizer": {"kind": "adamw", "num_updates": step}} | state
    return write(run / "checkpoints", model, layout, draw(model, seed=step), step, **state)


def write_run(run: Path, layouts: Sequence[str] = ("tp=1",) * 3, model: Any = MODELS["tied"]) -> list[Path]:
    """A checkpoint for each layout, from step 1 on."""
    return [write_step(run, step, layout, model) for step, layout in enumerate(layouts, 1)]


def merged(
    paths: Sequence[Path], mean: str = "uniform", *, moments: bool = True, force: bool = False
) -> MergedContents:
    parents = sort_parents([Contents(path) for path in paths])
    check_parents(parents, force=force)
    return MergedContents(parents, merge_weights(mean, len(parents)), mean, moments)


def merge_to(
    output: Path, paths: Sequence[Path], mean: str = "uniform", *, moments: bool = True, workers: int = 1,
    overwrite: bool = False,
) -> WrittenCheckpoint:  # fmt: skip
    source = merged(paths, mean, moments=moments)
    return write_checkpoint(
        source, output, source.files(), source.state(), MERGE, Limits(workers=workers, copies=COPIES),
        overwrite=overwrite, report=lambda done, total, earlier: None,
    )  # fmt: skip


def mean_of(arrays: Sequence[Arrays], shares: Sequence[float]) -> Arrays:
    """The weights' mean in numpy, in float64 and rounded once; all else is the last one's."""
    wanted = dict(arrays[-1])
    for name in wanted:
        if name.startswith("model."):
            total = np.float64(shares[0]) * arrays[0][name].astype(np.float64)
            for values, share in zip(arrays[1:], shares[1:], strict=True):
                total = total + np.float64(share) * values[name].astype(np.float64)
            wanted[name] = total.astype(np.float32)
    return wanted
