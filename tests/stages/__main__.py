"""Draw runs in stages by the hundred, and compare each with its model.

    python -m tests.stages [--draws 400] [--seed 1] [--show 5] [--processes 2]

Prints how many starts they had, and the first draws on which the program and the model disagree, with what was done.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.stages.trial import draw_runs


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw runs in stages, and compare each with its model.")
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--show", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    began, numbers = time.monotonic(), range(options.first, options.first + options.draws)
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        parts = [
            pool.submit(draw_runs, options.seed, [*numbers[n :: options.processes]]) for n in range(options.processes)
        ]
        trials = [trial for part in parts for trial in part.result()]
    wrong = [trial for trial in trials if trial.faults]
    for trial in wrong[: options.show]:
        print(trial)
    starts = sum(trial.num_starts for trial in trials)
    print(f"{len(trials)} draws with {starts} starts in {time.monotonic() - began:.0f} s, {len(wrong)} with a fault:")
    print(" ", ", ".join(trial.seed for trial in wrong) or "none")
    print("what was done:", dict(Counter(line.split()[0] for trial in trials for line in trial.log).most_common()))


if __name__ == "__main__":
    main()
