"""CPU seconds from the start to the end of a command that is refused: how long a mistake keeps a person waiting.

    python -m tests.benchmarks.mistakes [--count 60]

Draws from the mistakes of tests/mistakes, each in a process of its own, one after another.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mistakes.families import drawn
from tests.mistakes.written import written


def cpu_seconds(words: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "lmtrain.cli.main", *words], capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds of commands that are refused.")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=12)
    options = parser.parse_args()
    mistakes = [*written(), *drawn(options.seed)]
    seconds = {}
    for mistake in random.Random(options.seed).sample(mistakes, min(options.count, len(mistakes))):
        with tempfile.TemporaryDirectory() as folder:
            seconds[mistake.name] = cpu_seconds(mistake.at(Path(folder)))
    worst = max(seconds, key=seconds.__getitem__)
    median = statistics.median(seconds.values())
    print(f"{len(seconds)} mistakes: median {median:.2f} s of CPU, most {seconds[worst]:.2f} s ({worst})")


if __name__ == "__main__":
    main()
