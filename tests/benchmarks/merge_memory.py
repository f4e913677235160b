"""How long `lmtrain merge` of two checkpoints takes, and the anonymous memory it takes.

    python -m tests.benchmarks.merge_memory --gigabytes 4 --folder /tmp/merge

It is compared with `lmtrain verify` of one of the checkpoints and `lmtrain reshard` of the other to its own layout,
which read and write as much. Pairs alternate, the checkpoints are dropped from the system's cache before each pair's
halves, and the medians are compared. The exit code is 1 if the merge takes more than 1.5 times as long, or over 1 GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.read_verified_contents import Contents
from tests.benchmarks.reshard_speed import model_of_bytes, settle, timed, write

MOST_TIMES, MOST_BYTES = 1.5, 10**9


def measure(checkpoints: list[Path], layout: str, pairs: int, options: list[str]) -> dict[str, Any]:
    output = checkpoints[0].parents[2] / "output"
    apart, merges, peaks = [], [], []
    for _ in range(pairs):
        for checkpoint in checkpoints:
            settle(checkpoint, output)
        seconds = [timed("verify", str(checkpoints[0]))[0]]
        seconds.append(timed("reshard", str(checkpoints[1]), "--to", layout, "--output", str(output))[0])
        apart.append(sum(seconds))
        for checkpoint in checkpoints:
            settle(checkpoint, output)
        merge_s, peak = timed("merge", *map(str, checkpoints), "--output", str(output), *options)
        merges.append(merge_s)
        peaks.append(peak)
        words = f"verify {seconds[0]:.2f} s, reshard {seconds[1]:.2f} s, merge {merge_s:.2f} s"
        print(f"{words}, anonymous memory {peak / 2**20:.0f} MiB", flush=True)
    files = Contents(checkpoints[1]).manifest.files
    return {
        "bytes_of_a_checkpoint": sum(entry.size for entry in files.values()), "layout": layout,
        "verify_and_reshard_s": apart, "merge_s": merges,
        "ratio_of_medians": statistics.median(merges) / statistics.median(apart), "peak_anonymous_bytes": max(peaks),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of each of the two, weights and two moments")
    parser.add_argument("--layout", default="tp=2,dp=2")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="made, filled and removed again")
    parser.add_argument("options", nargs="*", help="after --, for merge: --workers 1")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    try:
        model, folder = model_of_bytes(int(given.gigabytes * 1e9)), given.folder / "run" / "checkpoints"
        checkpoints = [write(folder, model, given.layout, step) for step in (1000, 2000)]
        facts = measure(checkpoints, given.layout, given.pairs, given.options)
    finally:
        shutil.rmtree(given.folder)
    print(json.dumps(facts, indent=1))
    return int(facts["ratio_of_medians"] > MOST_TIMES or facts["peak_anonymous_bytes"] > MOST_BYTES)


if __name__ == "__main__":
    raise SystemExit(main())
