"""Record which tests reach the statement that each mutant changes, and how long each test takes.

The tests run without a mistake in copies whose modules note who comes by. What was recorded is kept file by file of
tests, so that a recording that was ended goes on, and only files of tests that changed are recorded again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants import plugin
from tests.mutants.copies import Copy
from tests.mutants.mutant import ROOT, Mutant, every_mutant
from tests.mutants.places import statement

# because: a start of pytest takes seconds, and files that share a fixture are neighbours
FILES_AT_ONCE = 8
LIMIT_S = 1500


@dataclass
class Reach:
    """The record of one suite."""

    seconds: dict[str, float] = field(default_factory=dict)  # of each test
    reached: dict[str, list[str]] = field(default_factory=dict)  # mutant -> the tests that come by
    failed: set[str] = field(default_factory=set)  # without any mistake

    def tests_of(self, mutant: str) -> list[str]:
        return [test for test in self.reached.get(mutant, []) if test in self.seconds and test not in self.failed]


def groups() -> list[list[str]]:
    """Return all files of tests, some at a time, but for those of the mutants, which no planted one passes."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [file for file in files if not file.startswith("tests/mutants/")]
    return [files[begin : begin + FILES_AT_ONCE] for begin in range(0, len(files), FILES_AT_ONCE)]


def recording() -> dict[str, Any]:
    """Return what the processes of a copy are told: the statement, or the file, of each mutant by its number."""
    statements: dict[str, list[list[int]]] = {}
    files: dict[str, list[int]] = {}
    for number, mutant in enumerate(every_mutant().values()):
        if mutant.file.endswith(".py"):
            if (place := statement(mutant)) is not None:
                statements.setdefault(mutant.file, []).append([*place, number])
        elif mutant.file.startswith("csrc/"):
            for file, place in calls_of_helper():
                statements.setdefault(file, []).append([*place, number])
        else:
            files.setdefault(mutant.file, []).append(number)
    return {"statements": statements, "files": files, "endings": sorted({Path(file).suffix for file in files})}


def calls_of_helper() -> list[tuple[str, tuple[int, int]]]:
    """Return the statements that call what csrc/ compiles to."""
    found = []
    for root in ("lmtrain", "data_tools"):
        for path in sorted((ROOT / root).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            lines = [line.strip() for line in path.read_text().splitlines()]
            for line in lines:
                if re.search(r"\bcompiled_helpers\.lib\b(?! is )", line) and path.read_text().count(line) == 1:
                    place = statement(Mutant(name="", file=file, function="", old=line, new="", breaks=""))
                    found += [(file, place)] if place is not None else []
    return found


def record(copy: Copy, files: list[str], marks: str) -> dict[str, Any]:
    """Run these files' tests in a copy, and return what they came by."""
    mutants = every_mutant()
    names = list(mutants)
    copy.tell(**recording())
    ran = copy.run(files, "-m", marks, limit_s=LIMIT_S)
    told = plugin.read(copy.notes)
    came: dict[str, set[int]] = {}
    noted = copy.notes / "reached"
    for line in noted.read_text().splitlines() if noted.exists() else ():
        which, number = map(int, line.split())
        if which:
            came.setdefault(told.tests[which - 1], set()).add(number)
    shared = [name.split(" ", 2)[1:] for name in came if name.startswith("fixture ")]
    reached: dict[str, list[str]] = {}
    for test, fixtures in told.fixtures.items():
        numbers = set(came.get(test, ()))
        for base, argument in shared:
            if argument in fixtures and test.startswith(base):
                numbers |= came[f"fixture {base} {argument}"]
        for number in sorted(numbers):
            reached.setdefault(names[number], []).append(test)
    failed = ran.failed
    if tests := [name for name in failed if name in told.fixtures]:  # some forbid their subject to write anywhere else
        copy.tell()
        failed = copy.run(tests, limit_s=LIMIT_S).failed
    return {
        "files": {file: digest(file) for file in files}, "marks": marks, "seconds": ran.durations, "failed": failed,
        "mutants": {name: mutant.digest for name, mutant in mutants.items()}, "reached": reached,
        "took_s": round(ran.seconds, 1),
    }  # fmt: skip


def digest(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


def read(kept: Iterable[dict[str, Any]], marks: str) -> Reach:
    """Join the entries of a suite: the newest of each file of tests, and mutants that are today what they were."""
    newest = {file: entry for entry in kept if entry["marks"] == marks for file in entry["files"]}
    today = {name: mutant.digest for name, mutant in every_mutant().items()}
    changed = {name for entry in newest.values() for name in today if entry["mutants"].get(name) != today[name]}
    reach = Reach()
    for file, entry in newest.items():
        reach.seconds |= {test: seconds for test, seconds in entry["seconds"].items() if _is_of(test, file)}
        reach.failed |= {test for test in entry["failed"] if _is_of(test, file)}
        for name in entry["reached"].keys() - changed:
            reach.reached.setdefault(name, []).extend(test for test in entry["reached"][name] if _is_of(test, file))
    return reach


def _is_of(test: str, file: str) -> bool:
    return test.partition("::")[0] == file


def missing(kept: list[dict[str, Any]], marks: str) -> list[list[str]]:
    """Return the groups of files that are not recorded as they are today."""
    known = {file: value for entry in kept if entry["marks"] == marks for file, value in entry["files"].items()}
    stale = [[file for file in group if known.get(file) != digest(file)] for group in groups()]
    return [group for group in stale if group]


def kept_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
