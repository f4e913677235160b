"""What a killed preprocess left behind, changed: the same command makes the files of an unbroken one, or refuses."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from lmtrain.tokenizer.train import train_bpe
from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import change_leftovers, digests, other_files

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
        what = change_leftovers(folder, rng, "0-00001.bin.kept")
        ran, expected = self.unbroken[options]

        def wrong(ran: Ran) -> str:
            return other_files(digests(folder), expected, alone=False)

        return Case(f"killed at {where}; {what}", self._call(options, folder), ran, wrong)
