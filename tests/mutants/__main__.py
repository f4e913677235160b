"""`python -m tests.mutants [--room ROOM]`: plant every mistake in a copy, and write which test notices it.

With `--drawn SEED` the mistakes are not those that people wrote but `--count` others, which the seed draws. What was
found is kept in build/mutants, so that a run that was ended goes on; `--again` forgets it. The first run records which
statements each test reaches. `--chosen N` plants N that a commit's hash chooses of those on record as noticed (none of
csrc), two drawn ones for each that was written, runs the test that noticed each, and fails where one does not any more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.mutants.draw import Drawn, draw, room_of, rooms_with_code
from tests.mutants.measure import candidates, in_order, own_tests
from tests.mutants.mutant import ROOT, Mutant, every_mutant, room_names
from tests.mutants.on_record import check_chosen, judged_as_nothing, write_noticed
from tests.mutants.record import Reach, kept_in
from tests.mutants.table import table, table_of_draw
from tests.mutants.undo import undo_real
from tests.mutants.workers import SUITES, in_copies, record_suite


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--room", action="append", help="of these rooms alone")
    parser.add_argument("--mutant", metavar="ROOM/NAME", action="append", help="these alone")
    parser.add_argument("--drawn", metavar="SEED", help="mistakes that the seed draws")
    parser.add_argument("--real", metavar="SEED", help="commits that mend something, which the seed draws, undone")
    parser.add_argument("--count", type=int, default=300, help="how many are drawn")
    parser.add_argument("--show", action="store_true", help="print the drawn ones that nothing noticed, to be judged")
    parser.add_argument("--suite", choices=[*SUITES, "both"], default="fast", help="wide: for what fast did not notice")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--copies", type=int, default=2, help="how many at once")
    parser.add_argument("--record", action="store_true", help="record what tests reach, and measure nothing")
    parser.add_argument("--again", action="store_true", help="forget what was found")
    parser.add_argument("--write", action="store_true", help="put what noticed each on record")
    parser.add_argument("--chosen", type=int, metavar="N", help="check N of those recorded as noticed")
    given = parser.parse_args()
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    suites = list(SUITES) if given.suite == "both" else [given.suite]
    if given.chosen:
        return check_chosen(out, given.chosen, given.copies)
    if given.again:
        (out / "found.jsonl").unlink(missing_ok=True)
    if given.real:
        undo_real(out, given.real, given.count, given.copies, suites)
        return 0
    mutants = _asked(given)
    if given.show:
        _show(mutants, kept_in(out / "found.jsonl"))
        return 0
    for suite in suites:
        reach = record_suite(out, suite, given.copies)
        if not given.record:
            _measure(out, suite, given.copies, mutants, reach)
    found = kept_in(out / "found.jsonl")
    print(table_of_draw(found, mutants, judged_as_nothing()) if given.drawn else table(found, every_mutant()))
    if given.write:
        write_noticed(found, mutants)
    return 0


def _asked(given: argparse.Namespace) -> dict[str, Mutant]:
    rooms: list[str] = given.room or []
    known = sorted(rooms_with_code()) if given.drawn else room_names()
    if unknown := sorted({*rooms} - {*known}):
        raise SystemExit(f"There is no room {unknown[0]}: {', '.join(known)}.")
    if given.drawn:
        drawn = [mutant for room in rooms or [""] for mutant in draw(given.drawn, given.count, room)]
        named: dict[str, Mutant] = {f"{room_of(mutant.file)}/{mutant.name}": mutant for mutant in drawn}
    else:
        named = {name: mutant for name, mutant in every_mutant().items() if not rooms or name.split("/")[0] in rooms}
    return {name: mutant for name, mutant in named.items() if not given.mutant or name in given.mutant}


def _measure(out: Path, suite: str, copies: int, mutants: dict[str, Mutant], reach: Reach) -> None:
    found = kept_in(out / "found.jsonl")
    nothing = judged_as_nothing()
    work = []
    for name, mutant in mutants.items():
        of_it = [entry for entry in found if entry["mutant"] == name and entry["digest"] == mutant.digest]
        if mutant.name in nothing or any(entry["by"] or entry["suite"] == suite for entry in of_it):
            continue
        room = name.partition("/")[0]
        # because: what runs as a module is imported no statement reaches; its room and the house see most of it
        near = [test for test in reach.seconds if test.startswith(("tests/house/", *own_tests(room)))]
        tests = candidates(room, mutant, reach) or ([] if mutant.function else in_order(room, near, reach.seconds))
        usual_s = {test: reach.seconds[test] for test in tests}
        work.append((sum(usual_s.values()), ("measure", room, mutant, tests, suite, usual_s)))
    # the cheap ones first, so that an early end leaves most of the table
    jobs = [job for _, job in sorted(work, key=lambda pair: pair[0])]
    began = time.monotonic()
    for count, entry in enumerate(in_copies(out, copies, jobs), 1):
        with (out / "found.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        by = entry["by"] or f"UNNOTICED by {entry['ran']} tests"
        print(f"  {count}/{len(jobs)} {time.monotonic() - began:.0f} s  {entry['mutant']}: {by} "
              f"({entry['seconds']} s)", flush=True)  # fmt: skip


def _show(mutants: dict[str, Mutant], found: list[dict[str, Any]]) -> None:
    """Print each that was measured and not noticed, with what it changes."""
    noticed = {entry["mutant"] for entry in found if entry["by"]}
    measured = {entry["mutant"]: entry["reach"] for entry in found}
    nothing = judged_as_nothing()
    for name, mutant in mutants.items():
        if name in measured and name not in noticed and mutant.name not in nothing and isinstance(mutant, Drawn):
            text = (ROOT / mutant.file).read_text()
            line = text.count("\n", 0, mutant.begin(text)) + 1
            before, after = mutant.change()
            print(f"\n{name}  {mutant.kind}  {measured[name]} tests come by\n{mutant.file}:{line} {mutant.function}")
            print(f"{mutant.old}\n  [{before}] -> [{after}]")


if __name__ == "__main__":
    sys.exit(main())
