"""Record which statements each test reaches, and how long it takes.

The tests run without a mistake in copies whose statements set flags. What was recorded is kept file by file of tests,
so that a recording that was ended goes on, and only files of tests that changed are recorded again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.mutants import plugin
from tests.mutants.copies import Copy
from tests.mutants.mutant import ROOT
from tests.mutants.numbering import Numbering, number_statements

# because: a start of pytest takes seconds, and files that share a fixture are neighbours
FILES_AT_ONCE = 8
LIMIT_S = 1500


@dataclass
class Reach:
    """The record of one suite."""

    seconds: dict[str, float] = field(default_factory=dict)  # of each test
    failed: set[str] = field(default_factory=set)  # without any mistake
    # of each numbering: its tests, and for each a bit for every statement
    parts: list[tuple[Numbering, list[str], np.ndarray[Any, Any]]] = field(default_factory=list)

    def tests_through(self, through: dict[str, list[str]]) -> list[str]:
        """Return the tests that come by one of these statements, as far as they pass without any mistake."""
        found: list[str] = []
        for numbering, tests, bits in self.parts:
            numbers = [number for file, keys in through.items() for number in numbering.numbers(file, keys)]
            if numbers:
                masks = np.zeros(bits.shape[1], np.uint8)
                for number in numbers:
                    masks[number >> 3] |= 0x80 >> (number & 7)
                found += [tests[index] for index in np.flatnonzero((bits & masks).any(axis=1))]
        return [test for test in found if test in self.seconds and test not in self.failed]

    def executed(self) -> dict[str, set[str]]:
        """Return for each file the keys of the statements that any test comes by."""
        found: dict[str, set[str]] = {}
        for numbering, _, bits in self.parts:
            reached = np.unpackbits(np.bitwise_or.reduce(bits, axis=0))
            for file, (first, keys) in numbering.files.items():
                found.setdefault(file, set()).update(key for at, key in enumerate(keys, first) if reached[at])
        return found


def groups() -> list[list[str]]:
    """Return all files of tests, some at a time, but for those of the mutants, which no planted one passes."""
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [file for file in files if not file.startswith("tests/mutants/")]
    return [files[begin : begin + FILES_AT_ONCE] for begin in range(0, len(files), FILES_AT_ONCE)]


def record(copy: Copy, files: list[str], marks: str) -> dict[str, Any]:
    """Run these files' tests in a copy, and return what they came by."""
    numbering = number_statements(copy.tree)
    (copy.folder.parent / f"numbering-{numbering.digest}.json").write_text(json.dumps(numbering.files))
    copy.tell(size=numbering.size, **numbering.told())
    ran = copy.run(files, "-m", marks, limit_s=LIMIT_S)
    told = plugin.read(copy.notes)
    shared = [name.split(" ", 2)[1:] for name in told.reached if name.startswith("fixture ")]
    reached: dict[str, str] = {}
    for test, fixtures in told.fixtures.items():
        bits = _unpacked(told.reached[test], numbering)
        for base, argument in shared:
            if argument in fixtures and test.startswith(base):
                bits |= _unpacked(told.reached[f"fixture {base} {argument}"], numbering)
        reached[test] = _packed(bits)
    failed = ran.failed
    if tests := [name for name in failed if name in told.fixtures]:  # code with flags in it is not what some expect
        copy.tell()
        failed = copy.run(tests, limit_s=LIMIT_S).failed
    digests = {file: digest(copy.tree / file) for file in files}
    return {
        "files": digests, "marks": marks, "seconds": ran.durations, "failed": failed,
        "numbering": numbering.digest, "reached": reached, "took_s": round(ran.seconds, 1),
    }  # fmt: skip


def _packed(bits: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(bits.tobytes())).decode()


def _unpacked(text: str, numbering: Numbering) -> np.ndarray[Any, Any]:
    found = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).copy()
    assert found.size == (numbering.size + 7) // 8
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read(file: Path, marks: str) -> Reach:
    """Join the entries of a suite: the newest of each file of tests."""
    newest = {name: entry for entry in kept_in(file) if entry["marks"] == marks for name in entry["files"]}
    reach = Reach()
    rows: dict[str, tuple[list[str], list[np.ndarray[Any, Any]]]] = {}
    numberings: dict[str, Numbering] = {}
    for name, entry in newest.items():
        reach.seconds |= {test: seconds for test, seconds in entry["seconds"].items() if _is_of(test, name)}
        reach.failed |= {test for test in entry["failed"] if _is_of(test, name)}
        key = entry["numbering"]
        if key not in numberings:
            numberings[key] = Numbering(json.loads((file.parent / f"numbering-{key}.json").read_text()))
        tests, bits = rows.setdefault(key, ([], []))
        for test, text in entry["reached"].items():
            if _is_of(test, name):
                tests.append(test)
                bits.append(_unpacked(text, numberings[key]))
    reach.parts = [(numberings[key], tests, np.stack(bits)) for key, (tests, bits) in rows.items() if tests]
    return reach


def _is_of(test: str, file: str) -> bool:
    return test.partition("::")[0] == file


def missing(kept: Iterable[dict[str, Any]], marks: str) -> list[list[str]]:
    """Return the groups of files that are not recorded as they are today."""
    known = {file: value for entry in kept if entry["marks"] == marks for file, value in entry["files"].items()}
    stale = [[file for file in group if known.get(file) != digest(ROOT / file)] for group in groups()]
    return [group for group in stale if group]


def kept_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
