"""Indexes that were kept, changed: the samples are the same ones, and what was damaged is said and built again."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np

from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.tokenizer.train import train_bpe
from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import change_any, some_bytes, some_json

MEGATRON = ("data.order=megatron", "data.megatron_samples=1400000")
PACKED = ("data.packing=best_fit", "data.document_mask=true")
RARE = 0.04  # the indexes that only millions of documents have


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        self.folder, self.run = folder, run
        train_bpe(["the cat and its mats"], 270).save(folder / "tokenizer.json")
        self.kinds = {"megatron": self._made("small", 2000, 20, MEGATRON)}

    def _made(
        self, name: str, num_documents: int, length: int, extra: tuple[str, ...]
    ) -> tuple[list[object], Ran, Path]:
        """The call, how it fares, and the indexes that it left: one of the kind, and what was first read."""
        prefix = self.folder / name
        with DatasetWriter(prefix, np.uint16) as writer:
            tokens = (np.arange(num_documents * length) % 251).astype(np.uint16)
            ones = np.ones(num_documents, np.int64)
            writer.add_documents(tokens, ones * length, ones)
        samples = [word for number in (3, 777, 1111) for word in ("--sample", number)]
        call: list[object] = [
            "data", "show", prefix, *samples, "--ids", "--json", f"data.tokenizer={self.folder / 'tokenizer.json'}",
            "model.seq_len=16", "train.steps=9", "train.global_batch=8", "schedule.warmup_steps=0", *extra,
        ]  # fmt: skip
        kept = self.folder / f"{name}.kept"
        honest(self.run, *call, f"data.index_dir={kept}", folder=self.folder)
        again = honest(self.run, *call, f"data.index_dir={kept}", folder=self.folder)
        assert len(list(kept.glob("*/facts.json"))) >= 1
        return call, again, kept

    def case(self, rng: random.Random, folder: Path) -> Case:
        kind = "packed" if rng.random() < RARE else "megatron"
        if kind not in self.kinds:
            self.kinds[kind] = self._made("large", 4_300_000, 2, PACKED)
        call, before, kept = self.kinds[kind]
        shutil.copytree(kept, folder / "kept")
        files = (path for path in (folder / "kept").rglob("*") if path.is_file() and not path.name.startswith("."))
        path = rng.choice(sorted(files))
        whole = path.read_bytes()
        what = self._change(path, rng)
        expected = rows(before)

        def wrong(ran: Ran) -> str:
            if rows(ran) != expected:
                return "other samples"
            # built again, or never another
            same = path.is_file() and (path.read_bytes() == whole or _same_json(path, whole))
            return "" if same or path.suffix == ".seen" else f"{path.name} is still damaged"

        return Case(what, (*call, f"data.index_dir={folder / 'kept'}"), before, wrong)

    def _change(self, path: Path, rng: random.Random) -> str:
        if path.name == "facts.json" and rng.random() < 0.5:
            what, value = some_json(json.loads(path.read_bytes()), rng)
            path.write_text(json.dumps(value, indent=1) + "\n")
            return f"{path.name}: {what}"
        if rng.random() < 0.8:
            what, data = some_bytes(path.read_bytes(), rng)
            path.write_bytes(data)
            return f"{path.parent.name}/{path.name}: {what}"
        return change_any(path, rng)


def _same_json(path: Path, whole: bytes) -> bool:
    """Spaces between values say nothing."""
    try:
        return path.suffix == ".json" and bool(json.loads(path.read_bytes()) == json.loads(whole))
    except ValueError:
        return False


def rows(ran: Ran) -> object:
    """What was shown, without what was said besides."""
    lines = ran.output.splitlines()
    first, last = lines.index("["), len(lines) - lines[::-1].index("]")
    return json.loads("\n".join(lines[first:last]))
