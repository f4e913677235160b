"""A run whose ranks are started in ways that differ: what each of twelve ways changes, and what a refusal must name.

`make_world` writes what the ways need: two datasets with one token apart, two tokenizers, a copy of the package with a
comment more, and a library that says another version. Used by the unit tests and by those through the command line.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import lmtrain
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.tokenizer.train import train_bpe

PACKAGE = Path(lmtrain.__file__).parent


@dataclass(frozen=True)
class Way:
    """What one rank is given beyond the others, and what must stand in the message."""

    named: str
    overrides: tuple[str, ...] = ()
    modules: str | None = None  # a folder in which this rank looks for modules first


@dataclass(frozen=True)
class World:
    folder: Path  # holds all of it, and the folder of the run
    settings: tuple[str, ...]
    ways: dict[str, Way]


def make_world(folder: Path, *settings: str) -> World:
    """Datasets without a sidecar, so that nothing but the ranks' agreement can tell the tokenizers apart."""
    tokens = np.random.default_rng(1).integers(200, size=3000)
    for name in ("data", "other"):
        with DatasetWriter(folder / name, np.uint16) as writer:
            writer.add_documents(tokens, np.array([3000]), np.array([1]))
        tokens[-7] += 1
    for name, text in (("tokenizer", "a cat sat on a mat"), ("another", "where dogs bark at a moon")):
        train_bpe([text], 257 + 5).save(folder / f"{name}.json")
    shutil.copytree(PACKAGE, folder / "code" / "lmtrain", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "code" / "conf").symlink_to(PACKAGE.parent / "conf")
    with (folder / "code" / "lmtrain" / "train" / "step.py").open("a") as file:
        file.write("# one line more\n")
    about = folder / "library" / "safetensors-99.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 99.0\n")
    chosen = {
        "data.path": folder / "data", "data.tokenizer": folder / "tokenizer.json", "data.index_dir": folder / "index",
        "run.dir": folder / "run", "train.steps": 4, "train.global_batch": 8, "train.micro_batch": 1,
        "train.valid_interval_steps": 0, "model.seq_len": 32, "model.num_layers": 2, "model.width": 32,
        "model.num_heads": 2, "compute.threads": 1, "schedule.warmup_steps": 2, "optim.lr": "3e-3",
        "checkpoint.interval_steps": "null", "observe.tensorboard": "false",
    }  # fmt: skip
    return World(folder, (*(f"{key}={value}" for key, value in chosen.items()), *settings), _ways(folder))


def _ways(folder: Path) -> dict[str, Way]:
    return {
        "lr": Way("optim.lr is", ("optim.lr=0.0031",)),
        "seed": Way("train.seed is", ("train.seed=7",)),
        "weight_decay": Way("optim.weight_decay is", ("optim.weight_decay=0.3",)),
        "dropout": Way("model.dropout is", ("model.dropout=0.2",)),
        "clip_norm": Way("optim.clip_norm is", ("optim.clip_norm=0.5",)),
        "data": Way("data.path is", (f"data.path={folder / 'other'}",)),
        "tokenizer": Way("data.tokenizer is", (f"data.tokenizer={folder / 'another.json'}",)),
        "steps": Way("train.steps is", ("train.steps=5",)),
        "precision": Way("precision.kind is", ("precision=bf16",)),
        "schedule": Way("schedule.kind is", ("schedule=linear",)),
        "code": Way("lmtrain/train/step.py is", modules=str(folder / "code")),
        "library": Way("safetensors is", modules=str(folder / "library")),
    }


def given(settings: Sequence[str], ways: Sequence[Way]) -> list[str]:
    """The settings of a rank to which these ways apply."""
    overrides = [override for way in ways for override in way.overrides]
    keys = {override.partition("=")[0] for override in overrides}
    return [one for one in settings if one.partition("=")[0] not in keys] + overrides
