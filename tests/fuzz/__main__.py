"""`python -m tests.fuzz [NAME ...] --seconds 60 --seed 1`: each fuzzer for so long, and how to see a fault again."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import fuzzers
from tests.fuzz.fuzzer import Case, Fuzzer, Ran, Runner, faults, generator


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(fuzzers.__path__))


def made(name: str, folder: Path, run: Runner) -> Fuzzer:
    folder.mkdir(parents=True, exist_ok=True)
    fuzzer: Fuzzer = importlib.import_module(f"tests.fuzz.fuzzers.{name}").Fuzz(folder, run)
    return fuzzer


def tried(fuzzer: Fuzzer, run: Runner, rng: random.Random, folder: Path) -> tuple[Case, Ran, list[str]]:
    """One case in a new folder, which is gone again if nothing was wrong."""
    folder.mkdir()
    case = fuzzer.case(rng, folder)
    ran = run(*case.arguments, folder=folder, writes=case.writes, env=case.env)
    found = faults(case, ran)
    if not found:
        shutil.rmtree(folder)
    return case, ran, found


def report(name: str, seed: int, index: int, case: Case, ran: Ran, found: list[str]) -> str:
    command = " ".join(map(str, case.arguments))
    tail = "\n".join(ran.output.strip().splitlines()[-6:])
    return (
        f"\n{name} case {index}: {'; '.join(found)}\n  changed: {case.what}\n  lmtrain {command}\n"
        f"  exit code {ran.code}\n{tail}\n"
        f"  again: python -m tests.fuzz {name} --seed {seed} --only {index} --keep FOLDER"
    )


def fuzz(name: str, seed: int, until: float, cases: Iterator[int], folder: Path) -> int:
    """Runs the cases of one fuzzer; the number of them that had a fault."""
    began, codes, bad = time.monotonic(), Counter[int](), 0
    with Runner(folder) as run:
        fuzzer = made(name, folder / "honest", run)
        for index in cases:
            if time.monotonic() > until:
                break
            case, ran, found = tried(fuzzer, run, generator(name, seed, index), folder / f"case{index}")
            codes[ran.code] += 1
            if found:
                bad += 1
                print(report(name, seed, index, case, ran, found), flush=True)
    counts = ", ".join(f"{count} ended with {code}" for code, count in sorted(codes.items()))
    took = time.monotonic() - began
    print(f"{name}: {codes.total()} cases in {took:.0f} s: {counts}; {bad} with a fault", flush=True)
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names())}; all if none is named")
    parser.add_argument("--seconds", type=float, default=60, help="for each fuzzer")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="at most so many of each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="just the case of this number")
    parser.add_argument("--keep", type=Path, help="where the files go, instead of a folder that is gone in the end")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(names())}")
    bad = 0
    with tempfile.TemporaryDirectory(prefix="lmtrain_fuzz_") as scratch:
        for name in options.names or names():
            cases = iter(range(options.cases)) if options.only is None else iter([options.only])
            folder = (options.keep or Path(scratch)).resolve() / name
            bad += fuzz(name, options.seed, time.monotonic() + options.seconds, cases, folder)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
