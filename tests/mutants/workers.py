"""Work that is done in several copies at once: recording a suite, and measuring mistakes."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.mutants import record
from tests.mutants.copies import Copy, adopt_orphans
from tests.mutants.measure import measure, measure_real

SUITES = {"fast": "not wide and not slow", "wide": "wide and not slow"}
_copy: Copy | None = None  # of this worker


def record_suite(out: Path, suite: str, copies: int) -> record.Reach:
    """Record the tests of a suite that are not recorded as they are today, and return the record of all."""
    file = out / "recorded.jsonl"
    groups = record.missing(record.kept_in(file), SUITES[suite])
    if groups:
        print(f"recording what the {suite} tests reach: {len(groups)} groups of files", flush=True)
    work = [("record", group, SUITES[suite]) for group in groups]
    for entry in in_copies(out, copies, work):
        with file.open("a") as log:
            log.write(json.dumps(entry) + "\n")
        print(f"  {len(entry['seconds'])} tests in {entry['took_s']} s, {len(entry['failed'])} failed", flush=True)
    return record.read(file, SUITES[suite])


def in_copies(out: Path, copies: int, work: list[Any]) -> Iterable[dict[str, Any]]:
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
