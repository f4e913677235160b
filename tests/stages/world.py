"""Datasets for drawn runs, the words that say a run's settings, and a process that starts them as the shell does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.tokenizer.train import train_wordpiece
from tests.stages.page import Data, Schedule, Settings, Source
from tests.unit.data.writing import add_document

SIZES = {"a": (20, 9), "b": (32, 7), "c": (12, 21), "d": (40, 5)}  # documents, tokens in each
COPIES = {"a2": "a", "b2": "b"}  # other paths of the same contents
_FIXED = (
    "model.positions=rotary", "model.num_layers=1", "model.width=8", "model.num_heads=2", "model.vocab_multiple=8",
    "train.micro_batch=1", "train.valid_interval_steps=0", "optim.eps=1e-4", "compute.threads=1",
    "observe.tensorboard=false", "observe.log_interval_steps=1", "checkpoint.keep_last=all",
    "checkpoint.asynchronous=false", "checkpoint.interval_s=null",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """The folder of the datasets, and the content at each path, which is its name in the folder."""

    folder: Path
    sources: dict[str, Source]
    vocab_size: int


def make_world(folder: Path) -> World:
    tokenizer = train_wordpiece(["a cat sat on a mat"], 40, lowercase=True)
    sources = {}
    for number, (name, (num_documents, tokens_each)) in enumerate(SIZES.items()):
        chance = np.random.default_rng(number)
        documents = [chance.integers(0, tokenizer.vocab_size, tokens_each) for _ in range(num_documents)]
        with DatasetWriter(folder / name, np.uint16) as writer:
            for document in documents:
                add_document(writer, [document])
            writer.describe(
                tokenizer=tokenizer.to_bytes(), fingerprint=tokenizer.fingerprint, num_bytes=42, eod_id=None,
                vocab_size=tokenizer.vocab_size,
            )  # fmt: skip
        digits = IndexedDataset.open(folder / name).content_digest[:16]
        sources[name] = Source(digits, tuple(tuple(map(int, document)) for document in documents))
    for copy, name in COPIES.items():
        _copy(folder, name, copy)
        sources[copy] = sources[name]
    return World(folder, sources, tokenizer.vocab_size)


def swap_files(world: World, one: str, other: str) -> World:
    """Swap the files of two datasets, and return the world as it is then."""
    for name, copy in ((one, "swap"), (other, one), ("swap", other)):
        for file in list(world.folder.glob(f"{name}.*")):
            file.rename(world.folder / f"{copy}{file.name[len(name) :]}")
    sources = world.sources
    return World(world.folder, sources | {one: sources[other], other: sources[one]}, world.vocab_size)


def _copy(folder: Path, name: str, copy: str) -> None:
    for file in list(folder.glob(f"{name}.*")):
        shutil.copy(file, folder / f"{copy}{file.name[len(name) :]}")


def words(world: World, settings: Settings, run_dir: Path, interval: int) -> list[str]:
    """Return the words that give a start these settings."""
    return [*_FIXED, f"run.dir={run_dir}", f"checkpoint.interval_steps={interval}", *_words(world, settings)]


def _words(world: World, settings: Settings) -> Iterator[str]:
    kind, keys = _data(world, settings.data)
    yield f"data={kind}"
    yield from (f"data.{key}={value}" for key, value in keys.items())
    kind, keys = _schedule(settings.schedule)
    yield f"schedule={kind}"
    yield from (f"schedule.{key}={value}" for key, value in keys.items())
    yield f"model.seq_len={settings.seq_len}"
    yield f"train.seed={settings.seed}"
    yield f"train.global_batch={settings.batch}"
    yield f"train.rampup={_rampup(settings.rampup)}"
    yield f"optim.lr={settings.lr!r}"
    yield f"optim.weight_decay={settings.weight_decay!r}"
    yield f"optim.clip_norm={settings.clip!r}"
    if settings.average:
        yield f"checkpoint.ema.decay={settings.average.decay!r}"
        yield f"checkpoint.ema.every_steps={settings.average.every}"
        yield f"checkpoint.ema.from_step={settings.average.since}"
    if not settings.stages:
        yield f"train.steps={settings.steps}"
    yield from stage_words(world, settings)


def stage_words(world: World, settings: Settings, first: int = 0) -> Iterator[str]:
    """Yield the words of the stages from number `first` on."""
    for stage in settings.stages[first:]:
        at = f"stages.{stage.name}"
        yield f"{at}.{stage.unit}={stage.length}"
        if stage.data:
            kind, keys = _data(world, stage.data)
            yield f"{at}.data={{kind: {kind}, {', '.join(f'{key}: {value}' for key, value in keys.items())}}}"
        if stage.schedule:
            kind, keys = _schedule(stage.schedule)
            yield f"{at}.schedule={{kind: {kind}, {', '.join(f'{key}: {value}' for key, value in keys.items())}}}"
        values = {
            "model.seq_len": stage.seq_len, "train.global_batch": stage.batch, "optim.lr": stage.lr,
            "optim.weight_decay": stage.weight_decay, "optim.clip_norm": stage.clip,
        }  # fmt: skip
        yield from (f"{at}.{key}={value!r}" for key, value in values.items() if value is not None)
        if stage.sets_rampup:
            yield f"{at}.train.rampup={_rampup(stage.rampup)}"
        if stage.stop_after:
            yield f"{at}.stop_after=true"


def _data(world: World, data: Data) -> tuple[str, dict[str, str]]:
    flag = {"train_on_held_out": "true"} if data.train_on_held_out else {}
    keys = {"split": f"[{1 - data.held_out:g},{data.held_out:g}]", "packing": data.packing} | flag
    if not data.is_blend:
        [part] = data.parts
        restart = {"restart": "true"} if part.restart else {}
        return "dataset", {"path": str(world.folder / part.path)} | keys | restart
    entries = [
        f"{{path: {world.folder / part.path}, {part.unit}: {part.amount}{', restart: true' * part.restart}}}"
        for part in data.parts
    ]
    return "blend", {"datasets": f"[{', '.join(entries)}]"} | keys


def _schedule(schedule: Schedule) -> tuple[str, dict[str, str]]:
    keys = {"warmup_steps": str(schedule.warmup)}
    if schedule.kind != "constant":
        keys["min_ratio"] = repr(schedule.min_ratio)
    if schedule.kind == "wsd":
        keys |= {"decay_fraction": repr(schedule.decay_fraction), "decay": schedule.decay}
    return schedule.kind, keys


def _rampup(rampup: tuple[int, int, int] | None) -> str:
    if rampup is None:
        return "null"
    return f"{{start: {rampup[0]}, increment: {rampup[1]}, samples: {rampup[2]}}}"
