"""Tokens per second of `lmtrain pretrain` beside the same GPT in bare torch and, if a checkout is given, nanoGPT's.

    make bench                       on a GPU: the workloads of docs/benchmarks.md
    make bench BENCH=--smoke         anywhere: a toy, to see that it runs
    make bench NANOGPT=~/nanoGPT

Every contender runs in a process of its own (one_run.py); rounds are interleaved (A B C A B C ...) and the medians
compared. The first steps, which compile, are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.workloads import make_data

WORKLOADS = ("gpt2_small", "gpt2_small_64", "high_flyer_8", "high_flyer_16")
SMOKE = ("gpt_tiny",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="workloads whose name starts so")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    contenders = ["lmtrain", "bare", *(["nanogpt"] if arguments.nanogpt else [])]
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder) / "data")
        for work in SMOKE if arguments.smoke else WORKLOADS:
            if not work.startswith(arguments.only):
                continue
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
            for number in range(arguments.rounds):
                for name in contenders:
                    more = ["--path", arguments.nanogpt] if name == "nanogpt" else []
                    found[name].append(one(name, work, Path(folder), number, more))
            report(work, found)


def one(name: str, work: str, folder: Path, number: int, more: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.one_run", name, work, *more]
    command += ["--data", str(folder / "data"), "--run", str(folder / f"{work}-{number}")]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def report(work: str, found: dict[str, list[dict[str, Any]]]) -> None:
    medians = {name: statistics.median(one["tokens_per_s"] for one in rounds) for name, rounds in found.items()}
    flops = {name: statistics.median(one["flops_per_s"] for one in rounds) for name, rounds in found.items()}
    print(work)
    for name, value in medians.items():
        rounds = ", ".join(f"{one['tokens_per_s']:,.0f}" for one in found[name])
        print(f"  {name:8} {value:12,.0f} tokens/s  {flops[name] / 1e12:7.2f} TFLOP/s  (rounds: {rounds})")
    for name in medians.keys() - {"lmtrain"}:
        print(f"  lmtrain is {medians['lmtrain'] / medians[name]:.3f} x {name}")


if __name__ == "__main__":
    main()
