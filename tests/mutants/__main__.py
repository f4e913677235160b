"""`python -m tests.mutants [--room ROOM]`: plant every mistake in a copy, and write which test notices it.

With `--drawn SEED` the mistakes are not those that people wrote but `--count` others, which the seed draws. What was
found is kept in build/mutants, so that a run that was ended goes on; `--again` forgets it. The first run records which
statements each test reaches. `--chosen N` plants N that a commit's hash chooses of those on record as noticed (none of
csrc), two drawn ones for each that was written, runs the test that noticed each, and fails where one does not any more.
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
from tests.mutants.draw import Drawn, draw, room_of, rooms_with_code
from tests.mutants.judged import judged_as_nothing
from tests.mutants.measure import candidates, in_order, measure, measure_real, own_tests
from tests.mutants.mutant import ROOT, DoesNotApplyError, Mutant, every_mutant, room_names
from tests.mutants.real import draw_real
from tests.mutants.table import table, table_of_draw

NOTICED = Path(__file__).with_name("noticed.json")
NOTICED_DRAWN = Path(__file__).with_name("noticed_drawn.json")
SUITES = {"fast": "not wide and not slow", "wide": "wide and not slow"}
_copy: Copy | None = None  # of this worker


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
        return _chosen(out, given.chosen, given.copies)
    if given.again:
        (out / "found.jsonl").unlink(missing_ok=True)
    if given.real:
        return _real(out, given.real, given.count, given.copies, suites)
    mutants = _asked(given)
    if given.show:
        _show(mutants, _found(out))
        return 0
    for suite in suites:
        _record(out, suite, given.copies)
        if not given.record:
            _measure(out, suite, given.copies, mutants)
    found = _found(out)
    print(table_of_draw(found, mutants, judged_as_nothing()) if given.drawn else table(found, every_mutant()))
    if given.write:
        _write(found, mutants)
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


def _record(out: Path, suite: str, copies: int) -> None:
    file = out / "recorded.jsonl"
    groups = record.missing(record.kept_in(file), SUITES[suite])
    if groups:
        print(f"recording what the {suite} tests reach: {len(groups)} groups of files", flush=True)
    work = [("record", group, SUITES[suite]) for group in groups]
    for entry in _in_copies(out, copies, work):
        with file.open("a") as log:
            log.write(json.dumps(entry) + "\n")
        print(f"  {len(entry['seconds'])} tests in {entry['took_s']} s, {len(entry['failed'])} failed", flush=True)


def _measure(out: Path, suite: str, copies: int, mutants: dict[str, Mutant]) -> None:
    reach = record.read(out / "recorded.jsonl", SUITES[suite])
    found = _found(out)
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
    for count, entry in enumerate(_in_copies(out, copies, jobs), 1):
        with (out / "found.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        by = entry["by"] or f"UNNOTICED by {entry['ran']} tests"
        print(f"  {count}/{len(jobs)} {time.monotonic() - began:.0f} s  {entry['mutant']}: {by} "
              f"({entry['seconds']} s)", flush=True)  # fmt: skip


def _real(out: Path, seed: str, count: int, copies: int, suites: list[str]) -> int:
    """Undo so many commits, print who notices each, and of how many of them their own tests and others do."""
    mistakes, lost = draw_real(seed, count, out / "undone")
    file = out / "real.jsonl"
    for suite in suites:
        _record(out, suite, copies)
        reach = record.read(out / "recorded.jsonl", SUITES[suite])
        known = record.kept_in(file)
        done = {entry["commit"] for entry in known if entry["suite"] == suite or (entry["own"] and entry["other"])}
        jobs = []
        for mistake in mistakes:
            room = room_of(next(iter(mistake.texts)))
            own = [test for test in reach.seconds if mistake.is_own(test) and test not in reach.failed]
            other = [test for test in reach.tests_through(mistake.through()) if test not in own]
            pair = [in_order(room, tests, reach.seconds) for tests in (own, other)]
            usual_s = {test: reach.seconds[test] for test in own + other}
            if mistake.commit not in done:
                jobs.append(("real", mistake, suite, *pair, usual_s))
        for entry in _in_copies(out, copies, jobs):
            with file.open("a") as log:
                log.write(json.dumps(entry) + "\n")
            print(f"  {suite} {entry['commit'][:12]} own: {entry['own']}, other: {entry['other']}", flush=True)
    found = {mistake.commit: {"own": False, "other": False} for mistake in mistakes}
    for entry in record.kept_in(file):
        for name, by in found.get(entry["commit"], {}).items():
            found[entry["commit"]][name] = by or bool(entry[name])
    counts = {name: sum(entry[name] for entry in found.values()) for name in ("own", "other")}
    either = sum(any(entry.values()) for entry in found.values())
    print(f"{len(found)} commits undone ({sum(mistake.is_whole for mistake in mistakes)} as a whole, the others at one "
          f"place; {lost} more do not reverse): noticed by the tests that came with it {counts['own']}, by others "
          f"{counts['other']}, by either {either}.")  # fmt: skip
    return 0


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


def _chosen(out: Path, count: int, copies: int) -> int:
    """Check those whose names follow the commit's hash most closely; the checkout decides, not the clock."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    every = every_mutant()
    # because: compiling all of csrc takes longer than the dozen
    written = {
        name: (every[name], facts["by"]) for name, facts in json.loads(NOTICED.read_text()).items()
        if facts["by"] and name in every and not name.startswith("csrc/")
    }  # fmt: skip
    drawn = {name: pair for name, pair in _drawn_on_record().items() if not name.startswith("csrc/")}
    jobs: list[Any] = []
    tests = {}
    for mutants, number in ((written, count - count * 2 // 3), (drawn, count * 2 // 3)):
        order = sorted(mutants, key=lambda name: hashlib.sha256(f"{commit}{name}".encode()).hexdigest())
        for name in order[:number]:
            mutant, by = mutants[name]
            tests[name] = by.removeprefix("collecting ").partition(" (stopped")[0]
            jobs.append(("measure", name.partition("/")[0], mutant, [tests[name]], "fast", {}))
    missed = 0
    for entry in _in_copies(out, copies, jobs):
        is_gone = str(entry["by"]).startswith("collection (")  # pytest knows no such test
        by = f"{tests[entry['mutant']]} IS GONE" if is_gone else entry["by"] or "UNNOTICED"
        print(f"  {entry['mutant']}: {by} ({entry['seconds']} s)", flush=True)
        missed += is_gone or entry["by"] is None
    print(f"{len(jobs) - missed} of {len(jobs)} planted mistakes were noticed by the test that is on record for each.")
    return 1 if missed else 0


def _drawn_on_record() -> dict[str, tuple[Mutant, str]]:
    """Return those that were drawn and noticed, as far as their code is still there."""
    found: dict[str, tuple[Mutant, str]] = {}
    for facts in json.loads(NOTICED_DRAWN.read_text()):
        mutant = Drawn(**facts["mutant"], breaks="")
        try:
            mutant.check()
        except DoesNotApplyError:
            continue
        found[f"{room_of(mutant.file)}/{mutant.name}"] = mutant, facts["by"]
    return found


def _write(found: list[dict[str, Any]], mutants: dict[str, Mutant]) -> None:
    by = {entry["mutant"]: entry for entry in found}
    drawn = {name: mutant for name, mutant in mutants.items() if isinstance(mutant, Drawn)}
    if drawn:
        kept = {facts["mutant"]["name"]: facts for facts in json.loads(NOTICED_DRAWN.read_text())}
        for name, mutant in drawn.items():
            if name in by and by[name]["suite"] == "fast" and "::" in (by[name]["by"] or ""):
                facts = {key: getattr(mutant, key) for key in (
                    "name", "file", "function", "old", "new", "kind", "statement", "count"
                )}  # fmt: skip
                kept[mutant.name] = {"mutant": facts, "by": by[name]["by"]}
        lines = [json.dumps(kept[name]) for name in sorted(kept)]
        NOTICED_DRAWN.write_text("[\n" + ",\n".join(lines) + "\n]\n")
        return
    known = json.loads(NOTICED.read_text()) if NOTICED.exists() else {}
    for name, entry in by.items():
        if entry["by"] is None and entry["suite"] == "fast" and known.get(name, entry)["suite"] == "wide":
            continue
        known[name] = {key: entry[key] for key in ("by", "suite", "seconds")}
    every = every_mutant()
    NOTICED.write_text(json.dumps({name: known[name] for name in sorted(known) if name in every}, indent=1) + "\n")


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
    if job[0] == "real":
        return measure_real(_copy, *job[1:])
    _, room, mutant, tests, suite, usual_s = job
    return measure(_copy, room, mutant, tests, suite, usual_s).as_facts()


if __name__ == "__main__":
    sys.exit(main())
