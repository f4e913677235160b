"""`python -m tests.drills [NAME ...] --out build/drills`: each drill prints a line of JSON, kept in results.jsonl too.

A drill that was ended goes on where it was. docs/explanation/faults.md says what each shows and what was found.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import sys
from pathlib import Path

from lmtrain.runtime.processes.process_environment import git_commit
from tests.drills.broken import Options, World

NAMES = ("injections", "hangs", "starts", "false_alarms", "day", "slurm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all of them by default")
    parser.add_argument("--out", type=Path, default=Path("build/drills"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="injections, or hangs of each kind, or failures of a day")
    parser.add_argument("--seconds", type=float, help="of false_alarms")
    parser.add_argument("--layouts", help="of injections: one,dp2,...")
    given = parser.parse_args()
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"no drill {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    passed = True
    for name in given.names or NAMES:
        folder = given.out.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        layouts = tuple(given.layouts.split(",")) if given.layouts else None
        options = Options(
            World.made(given.out.resolve() / "world"), folder, given.seed, given.count, given.seconds, layouts
        )
        found = importlib.import_module(f"tests.drills.{name}").drill(options)
        facts = {"drill": name, "date": datetime.date.today().isoformat(), "host_cpus": _cpus(), "seed": given.seed}
        facts |= {"commit": (git_commit(Path(__file__).resolve().parents[2]) or "")[:12], **found}
        with (given.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")
        print(json.dumps(facts), flush=True)
        passed &= bool(found["passed"])
    return 0 if passed else 1


def _cpus() -> str:
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    models = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
