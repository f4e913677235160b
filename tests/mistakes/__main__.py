"""Type wrong command lines, and what the answers advise, by the thousand.

    python -m tests.mistakes [--lines 20000] [--seed 1] [--show 20] [--processes 2]

Prints how the lines ended, and the first of each kind of fault with all that was typed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mistakes.grammar import draw, verbs
from tests.mistakes.runner import Runner
from tests.mistakes.typist import Trial, try_line
from tests.mistakes.world import LACKING, make_world, right_line


def try_lines(world: Path, seed: str, count: int, show: Callable[[Trial], object] = str) -> list[Trial]:
    """Draw and try `count` lines in one process, and show each trial with a fault as soon as it is there."""
    rng, trials = random.Random(seed), list[Trial]()
    with Runner(world) as runner:
        ends = {
            tuple(name.split()): runner(right_line(tuple(name.split()), verbs()[tuple(name.split())])).text
            for name in LACKING
        }
        for _ in range(count):
            line = draw(rng)
            trials.append(try_line(runner, line, rng, ends.get(line.verb, "")))
            if trials[-1].faults:
                show(trials[-1])
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description="Type wrong lines and what their answers advise.")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--show", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--world", type=Path, help="a folder to keep the world in, so that it is made once")
    options = parser.parse_args()
    start, shown = time.monotonic(), Counter[str]()

    def show(trial: Trial) -> None:
        kind = trial.faults[0].split()[0] + trial.line.kinds[0]
        if shown[kind] < max(1, options.show // 20) and sum(shown.values()) < options.show:
            shown[kind] += 1
            print(trial, flush=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        place = options.world or Path(folder) / "world"
        if not place.exists():
            make_world(place)
        from shutil import copytree

        worlds = [copytree(place, Path(folder) / f"world_{n}") for n in range(options.processes)]
        share = -(-options.lines // options.processes)
        parts = [pool.submit(try_lines, world, f"{options.seed}/{n}", share, show) for n, world in enumerate(worlds)]
        trials = [trial for part in parts for trial in part.result()]
    wrong = [trial for trial in trials if trial.faults]
    print(
        f"{len(trials)} lines in {time.monotonic() - start:.0f} s:",
        dict(Counter(trial.end for trial in trials if not trial.faults)),
    )
    print("faults:", dict(Counter(" ".join(trial.faults[0].split()[:2]) for trial in wrong).most_common()))
    print("by kind:", dict(Counter(trial.line.kinds[0] for trial in wrong).most_common()))


if __name__ == "__main__":
    main()
