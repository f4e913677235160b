"""What a run wrote of itself, changed: trace, report and the tables of runs say what is damaged, or show the rest."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from lmtrain.layout import Layout
from tests.benchmarks.report_page import write_run
from tests.fuzz.fuzzer import Case, Runner, honest
from tests.fuzz.mutate import change_any, some_bytes
from tests.unit.observe.timeline.made_up import Made

RUN = "a"
VERBS: dict[str, tuple[object, ...]] = {
    "trace": ("trace", RUN, "--json"),
    "trace to a file": ("trace", RUN, "--out", "step.json"),
    "report": ("report", RUN, "--out", "page.html"),
    "runs": ("runs", ".", "--json"),
    "diff": ("runs", "diff", RUN, "b"),
}


class Fuzz:
    def __init__(self, folder: Path, run: Runner) -> None:
        self.folder = folder / "runs"
        for name, seed in ((RUN, 1), ("b", 2)):
            (self.folder / name).mkdir(parents=True)
            Made(layout=Layout(pp=2, dp_shard=2), steps=(10, 11), seed=seed).write(self.folder / name)
            write_run(self.folder / name, steps=400, every=10)
        self.honest = {name: honest(run, *words, folder=self.folder) for name, words in VERBS.items()}

    def case(self, rng: random.Random, folder: Path) -> Case:
        for name in (RUN, "b"):
            shutil.copytree(self.folder / name, folder / name)
        verb = rng.choice(sorted(self.honest))
        kept = (path for path in (folder / RUN).rglob("*") if path.is_file())
        path = rng.choice(sorted(path for path in kept if verb.startswith("trace") <= (path.suffix == ".spans")))
        if rng.random() < 0.9:
            what, data = some_bytes(path.read_bytes(), rng)
            path.write_bytes(data)
        else:
            what = change_any(path, rng)
        return Case(f"{path.name}: {what}", VERBS[verb], self.honest[verb])
