"""Run cases by name and print them beside one process: `python -m tests.layouts.replay gqa-tp2-dp2-zero3-fp32-micro4`.

`--list 2` prints the names of the pairwise array, `--list 3` those of the three-wise one; `--bug NAME` plants a bug.
"""

from __future__ import annotations

import argparse
import sys

from tests.layouts.cases import Case, array
from tests.layouts.outcome import References, check, errors, run
from tests.layouts.workers import Pool


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.layouts.replay", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", type=int, choices=(2, 3), help="print the names of an array")
    parser.add_argument("--bug", help="plant this bug of tests/layouts/bugs.py")
    parser.add_argument("--all", action="store_true", help="print every gradient, not the ten that are furthest off")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(case.name for case in array(options.list, num_compiled=4)))
    failed = 0
    with Pool() as pool:
        references = References(pool)
        for name in options.names:
            failed += not replay(Case.named(name), references, options.bug, None if options.all else 10)
    return min(failed, 1)


def replay(case: Case, references: References, bug: str | None, most: int | None) -> bool:
    """Print the comparison; True where the case equals one process."""
    problems = case.problems()
    if problems:
        print(f"{case.name} is no legal layout:", *problems, sep="\n  ")
        return False
    found = run(references.pool, case, bug=bug)
    one, exact = references.of(case), references.exact(case)
    print(f"{case.name} beside {case.reference.name}")
    for what in ("losses", "norms"):
        for label, outcome in ((case.precision, found), (f"one {case.precision}", one), ("one fp32", exact)):
            print(f"  {what:7} {label:9}", *(f"{value:.8f}" for value in getattr(outcome, what)))
    rows = sorted(errors(case, found, references), key=lambda row: row[1] / row[2], reverse=True)
    for what, value, limit in rows[:most]:
        print(f"  {what:50} off by {value:.2e}, allowed {limit:.2e}{'' if value <= limit else '   WRONG'}")
    wrong = check(case, found, references)
    print("  WRONG" if wrong else "  equal", *wrong, sep="\n    ")
    return not wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
