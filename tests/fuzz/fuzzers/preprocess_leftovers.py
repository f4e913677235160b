"""What a killed preprocess left behind, changed: the same command makes the files of an unbroken one, or refuses."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

from lmtrain.tokenizer.train import train_bpe
from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import change_any, change_bytes

POINTS = ("slice:count=2", "slice:count=3", "journal:count=3", "finish", "publish:count=1", "publish:count=4")
SHARDED = ("--shard-tokens", "1000000")


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        """Three slices of text with a bad line, as one dataset and in shards, and attempts at both that were killed."""
        words = [f"the cat {i} and its mats in room {i % 17}" for i in range(40)]
        lines = [json.dumps({"text": " ".join(words[i % 23 :] * 12)}) for i in range(900)]
        lines[5] = lines[700] = "{nonsense"
        self.text, self.tokenizer = folder / "text.jsonl", folder / "tokenizer.json"
        self.text.write_text("\n".join(lines))
        train_bpe(words, 300).save(self.tokenizer)
        self.unbroken: dict[tuple[str, ...], tuple[Ran, dict[str, str]]] = {}
        self.leftovers: list[tuple[tuple[str, ...], str, Path]] = []
        for number, options in enumerate(((), SHARDED)):
            place = folder / f"unbroken{number}"
            place.mkdir()
            self.unbroken[options] = honest(run, *self._call(options, place), folder=place), digests(place)
            shutil.rmtree(place)
        for number, point in enumerate(POINTS):
            options, place = (SHARDED, ())[number % 2], folder / f"leftovers{number}"
            place.mkdir()
            fault = {"LMTRAIN_FAULT": f"kill:point=data.{point}", "LMTRAIN_ALLOW_FAULTS": "1"}
            ran = run(*self._call(options, place), folder=place, env=fault)
            assert ran.code == -9, ran
            self.leftovers.append((options, point, place))

    def _call(self, options: tuple[str, ...], folder: Path) -> tuple[object, ...]:
        return (
            "preprocess", self.text, "--tokenizer", self.tokenizer, "--output", folder / "data", "--workers", 1,
            "--on-error", "quarantine", *options,
        )  # fmt: skip

    def case(self, rng: random.Random, folder: Path) -> Case:
        options, where, kept = rng.choice(self.leftovers)
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
        what = [change(rng.choice(files), rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        ran, expected = self.unbroken[options]

        def wrong(ran: Ran) -> str:
            found = digests(folder)
            names = sorted(name for name in expected if found.get(name) != expected[name])
            return f"other than an unbroken one: {', '.join(names)}" if names else ""

        return Case(f"killed at {where}; {'; '.join(what)}", self._call(options, folder), ran, wrong)


def change(path: Path, rng: random.Random) -> str:
    if not path.is_file() or path.is_symlink():
        return f"{path.name} was gone"
    if rng.random() < 0.1:
        other = path.with_name(rng.choice(("more", "0-00001.bin.kept", ".x")))
        if not other.exists():
            os.link(path, other)
        return f"{path.name} is also {other.name}"
    return (change_bytes if rng.random() < 0.7 else change_any)(path, rng)


def digests(folder: Path) -> dict[str, str]:
    """The files of the dataset, by name."""
    files = (path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
