"""What notices mistakes that were really made: the tests that came with the commit that mended each, and others."""

from __future__ import annotations

import json
from pathlib import Path

from tests.mutants.draw import room_of
from tests.mutants.measure import in_order
from tests.mutants.real import draw_real
from tests.mutants.record import kept_in
from tests.mutants.workers import in_copies, record_suite


def undo_real(out: Path, seed: str, count: int, copies: int, suites: list[str]) -> None:
    """Undo so many commits, print who notices each, and of how many of them their own tests and others do."""
    mistakes, lost = draw_real(seed, count, out / "undone")
    file = out / "real.jsonl"
    for suite in suites:
        reach = record_suite(out, suite, copies)
        known = kept_in(file)
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
        for entry in in_copies(out, copies, jobs):
            with file.open("a") as log:
                log.write(json.dumps(entry) + "\n")
            print(f"  {suite} {entry['commit'][:12]} own: {entry['own']}, other: {entry['other']}", flush=True)
    found = {mistake.commit: {"own": False, "other": False} for mistake in mistakes}
    for entry in kept_in(file):
        for name, by in found.get(entry["commit"], {}).items():
            found[entry["commit"]][name] = by or bool(entry[name])
    counts = {name: sum(entry[name] for entry in found.values()) for name in ("own", "other")}
    either = sum(any(entry.values()) for entry in found.values())
    print(f"{len(found)} commits undone ({sum(mistake.is_whole for mistake in mistakes)} as a whole, the others at one "
          f"place; {lost} more do not reverse): noticed by the tests that came with it {counts['own']}, by others "
          f"{counts['other']}, by either {either}.")  # fmt: skip
