"""`python -m tests.mutants [--room ROOM]`: plant every mistake in a copy, and write which test notices it.

What was found is kept in build/mutants, so that a run that was ended goes on; `--again` forgets it. The first run
records which tests come by each mistake. `--chosen N` plants N that a commit's hash chooses of those that are recorded
as noticed (none of csrc), runs the test that noticed each, and fails where one does not any more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutants import record
from tests.mutants.copies import Copy, adopt_orphans
from tests.mutants.measure import candidates, measure
from tests.mutants.mutant import ROOT, every_mutant, room_names
from tests.mutants.table import table

NOTICED = Path(__file__).with_name("noticed.json")
SUITES = {"fast": "not wide and not slow", "wide": "wide and not slow"}
_copy: Copy | None = None  # of this worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--room", choices=room_names(), action="append", help="of these rooms alone")
    parser.add_argument("--mutant", metavar="ROOM/NAME", action="append", help="these alone")
    parser.add_argument("--suite", choices=[*SUITES, "both"], default="fast", help="wide: for what fast did not notice")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--copies", type=int, default=2, help="how many at once")
    parser.add_argument("--record", action="store_true", help="record who comes by, and measure nothing")
    parser.add_argument("--again", action="store_true", help="forget what was found")
    parser.add_argument("--write", action="store_true", help=f"write what noticed each into {NOTICED.name}")
    parser.add_argument("--chosen", type=int, metavar="N", help="check N of those recorded as noticed")
    given = parser.parse_args()
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.chosen:
        return _chosen(out, given.chosen, given.copies)
    if given.again:
        (out / "found.jsonl").unlink(missing_ok=True)
    for suite in SUITES if given.suite == "both" else [given.suite]:
        _record(out, suite, given.copies)
        if not given.record:
            _measure(out, suite, given.copies, _asked(given.room, given.mutant))
    found = _found(out)
    print(table(found, every_mutant()))
    if given.write:
        _write(found)
    return 0


def _asked(rooms: list[str] | None, mutants: list[str] | None) -> list[str]:
    named = [name for name in every_mutant() if not rooms or name.partition("/")[0] in rooms]
    return [name for name in named if not mutants or name in mutants]


def _record(out: Path, suite: str, copies: int) -> None:
    file = out / "recorded.jsonl"
    groups = record.missing(record.kept_in(file), SUITES[suite])
    if groups:
        print(f"recording which of the {suite} tests come by: {len(groups)} groups of files", flush=True)
    work = [("record", group, SUITES[suite]) for group in groups]
    for entry in _in_copies(out, copies, work):
        with file.open("a") as log:
            log.write(json.dumps(entry) + "\n")
        print(f"  {len(entry['seconds'])} tests in {entry['took_s']} s, {len(entry['failed'])} failed", flush=True)


def _measure(out: Path, suite: str, copies: int, names: list[str]) -> None:
    reach = record.read(record.kept_in(out / "recorded.jsonl"), SUITES[suite])
    found = _found(out)
    work = []
    for name in names:
        mutant = every_mutant()[name]
        of_it = [entry for entry in found if entry["mutant"] == name and entry["digest"] == mutant.digest]
        if any(entry["by"] or entry["suite"] == suite for entry in of_it):
            continue
        tests, known = candidates(name.partition("/")[0], name, reach)
        work.append((sum(reach.seconds[test] for test in tests), ("measure", name, tests, suite, known, reach)))
    # the cheap ones first, so that an early end leaves most of the table
    jobs = [job for _, job in sorted(work, key=lambda pair: pair[0])]
    began = time.monotonic()
    for count, entry in enumerate(_in_copies(out, copies, jobs), 1):
        with (out / "found.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        by = entry["by"] or f"UNNOTICED by {entry['ran']} tests"
        print(f"  {count}/{len(jobs)} {time.monotonic() - began:.0f} s  {entry['mutant']}: {by} "
              f"({entry['seconds']} s)", flush=True)  # fmt: skip


def _chosen(out: Path, count: int, copies: int) -> int:
    """Check those whose names follow the commit's hash most closely; the checkout decides, not the clock."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    # because: compiling all of csrc takes longer than the dozen
    noticed = {
        name: facts for name, facts in json.loads(NOTICED.read_text()).items()
        if facts["by"] and not name.startswith("csrc/")
    }  # fmt: skip
    order = sorted(noticed, key=lambda name: hashlib.sha256(f"{commit}{name}".encode()).hexdigest())
    tests = {name: noticed[name]["by"].removeprefix("collecting ").partition(" (stopped")[0] for name in order[:count]}
    work = [("measure", name, [test], "fast", True, record.Reach()) for name, test in tests.items()]
    missed = 0
    for entry in _in_copies(out, copies, work):
        is_gone = str(entry["by"]).startswith("collection (")  # pytest knows no such test
        by = f"{tests[entry['mutant']]} IS GONE" if is_gone else entry["by"] or "UNNOTICED"
        print(f"  {entry['mutant']}: {by} ({entry['seconds']} s)", flush=True)
        missed += is_gone or entry["by"] is None
    print(f"{len(work) - missed} of {len(work)} planted mistakes were noticed by the test that is on record for each.")
    return 1 if missed else 0


def _write(found: list[dict[str, Any]]) -> None:
    known = json.loads(NOTICED.read_text()) if NOTICED.exists() else {}
    for entry in found:
        known[entry["mutant"]] = {name: entry[name] for name in ("by", "suite", "seconds")}
    kept = {name: known[name] for name in sorted(known) if name in every_mutant()}
    NOTICED.write_text(json.dumps(kept, indent=1) + "\n")


def _found(out: Path) -> list[dict[str, Any]]:
    return record.kept_in(out / "found.jsonl")


def _in_copies(out: Path, copies: int, work: list[Any]) -> Iterable[dict[str, Any]]:
    """Do the work in so many copies at once, each with a process of its own; results come as they are done."""
    if not work:
        return
    context = multiprocessing.get_context("fork")
    numbers = context.Queue()
    for number in range(copies):
        numbers.put(number)
    with context.Pool(copies, _begin, (out, numbers)) as pool:
        yield from pool.imap_unordered(_do, work)


def _begin(out: Path, numbers: Any) -> None:
    global _copy
    adopt_orphans()
    _copy = Copy(out / f"copy{numbers.get()}")
    _copy.refresh()


def _do(job: tuple[Any, ...]) -> dict[str, Any]:
    assert _copy is not None
    if job[0] == "record":
        return record.record(_copy, job[1], job[2])
    _, name, tests, suite, known, reach = job
    return measure(_copy, name.partition("/")[0], every_mutant()[name], tests, suite, known, reach).as_facts()


if __name__ == "__main__":
    sys.exit(main())
