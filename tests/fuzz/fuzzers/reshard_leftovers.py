"""What a killed reshard left behind, changed: the same command again gives what an unbroken one gives, or refuses."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from lmtrain.models.gpt_settings import GPTSettings
from tests.benchmarks.reshard_speed import write
from tests.fuzz.fuzzer import Case, Ran, Runner, honest
from tests.fuzz.mutate import change_leftovers, digests, other_files

MODEL = GPTSettings(num_layers=2, width=128, num_heads=4, vocab_size=12_000, seq_len=256)
LAYOUTS = ("tp=2", "tp=2,dp=2")
POINTS = ("segment", "journal", "finish", "publish", "cleanup")


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        """A checkpoint of some blocks, and a few attempts at it that were killed."""
        self.source = write(folder, MODEL, "dp=2")
        self.unbroken: dict[str, tuple[Ran, dict[str, str]]] = {}
        self.leftovers: list[tuple[str, str, Path]] = []
        for number, layout in enumerate(LAYOUTS):
            place = folder / f"unbroken{number}"
            place.mkdir()
            self.unbroken[layout] = honest(run, *self._call(layout, place), folder=place), digests(place / "out")
            shutil.rmtree(place)
        for number, point in enumerate(POINTS):
            layout, place = LAYOUTS[number % len(LAYOUTS)], folder / f"leftovers{number}"
            place.mkdir()
            fault = {"LMTRAIN_FAULT": f"kill:point=reshard.{point}", "LMTRAIN_ALLOW_FAULTS": "1"}
            ran = run(*self._call(layout, place), folder=place, env=fault)
            assert ran.code == -9, ran
            self.leftovers.append((layout, point, place))

    def _call(self, layout: str, folder: Path) -> tuple[object, ...]:
        return ("reshard", self.source, "--to", layout, "--output", folder / "out", "--workers", 2)

    def case(self, rng: random.Random, folder: Path) -> Case:
        layout, where, kept = rng.choice(self.leftovers)
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        what = change_leftovers(folder, rng, "rank_00000.safetensors.kept")
        ran, expected = self.unbroken[layout]

        def wrong(ran: Ran) -> str:
            return other_files(digests(folder / "out"), expected, alone=True)

        return Case(f"killed at {where}; {what}", self._call(layout, folder), ran, wrong)
