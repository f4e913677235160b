"""CPU seconds from the start to the end of a command that is refused: how long a mistake keeps a person waiting.

    python -m tests.benchmarks.mistakes [--count 60]

Draws wrong lines of `lmtrain pretrain` from the grammar of tests/mistakes, each in a process of its own, one after
another.
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
from collections.abc import Iterator
from pathlib import Path

from tests.mistakes.grammar import SETTING_MISTAKES, Line

ROOT = Path(__file__).resolve().parents[2]


def wrong_lines(seed: int, count: int) -> Iterator[list[str]]:
    """Yield lines with one mistake in their settings, of which nothing is started."""
    rng = random.Random(seed)
    for mistake in rng.choices(list(SETTING_MISTAKES), k=count):
        line = mistake(Line(("pretrain", "data.path=x", "--print-config"), ("pretrain",)), rng)
        yield list(line.words)


def cpu_seconds(words: list[str]) -> float | None:
    """Return the CPU seconds of a command that is refused, None if it is not."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, "-m", "lmtrain.cli.main", *words], capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds if ended.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds of commands that are refused.")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=12)
    options = parser.parse_args()
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for words in wrong_lines(options.seed, options.count):
            if (taken := cpu_seconds(words)) is not None:
                seconds[" ".join(words)] = taken
    worst = max(seconds, key=seconds.__getitem__)
    median = statistics.median(seconds.values())
    print(f"{len(seconds)} mistakes: median {median:.2f} s of CPU, most {seconds[worst]:.2f} s ({worst})")


if __name__ == "__main__":
    main()
