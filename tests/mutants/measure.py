"""Find the test that notices a planted mistake: run those that reach it, the room's own first, until one fails."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from dataclasses import asdict, dataclass

from tests.mutants.copies import Copy
from tests.mutants.mutant import Mutant
from tests.mutants.numbering import reached_through
from tests.mutants.real import RealMistake
from tests.mutants.record import Reach

# where a room's own tests are, if not in tests/unit/ROOM
OWN = {
    "cli": ("tests/cli/",), "start": ("tests/unit/start/", "tests/cli/"), "lmtrain": ("tests/unit/test_",),
    "conf": ("tests/unit/config/", "tests/contracts/", "tests/unit/plan/test_hardware.py"),
    "config": ("tests/unit/config/", "tests/mistakes/"),
    "csrc": ("tests/unit/runtime/", "tests/unit/tokenizer/", "tests/unit/data_tools/", "tests/unit/data/"),
    "data_tools": ("tests/unit/data_tools/",), "objectives": ("tests/unit/models/objectives/",),
    "parallel": ("tests/unit/parallel/", "tests/layouts/"),
}  # fmt: skip
# because: most mistakes are noticed soon, and to collect all the tests takes longer than to run some
FIRST_S = 20.0
COMPILER = "the compiler"


@dataclass(frozen=True)
class Found:
    """Result for one mutant and one suite."""

    mutant: str  # ROOM/NAME
    suite: str
    digest: str  # of the mutant: a changed one is measured anew
    by: str | None  # the test that noticed it
    seconds: float  # until then, or of all
    ran: int  # tests
    reach: int  # tests that come by
    loaded: int  # processes that loaded the file with the mistake

    def as_facts(self) -> dict[str, object]:
        return asdict(self)


def own_tests(room: str) -> tuple[str, ...]:
    """Return how the names of a room's own tests begin."""
    return OWN.get(room, (f"tests/unit/{room}/",))


def candidates(room: str, mutant: Mutant, reach: Reach) -> list[str]:
    """Return the tests that reach it, in the order to run them."""
    tests = reach.tests_through(reached_through(mutant))
    if mutant.file.endswith(".yaml"):
        # because: what was composed once is remembered, and its files are not opened again
        own = OWN["conf"]
        tests = [*tests, *(test for test in reach.seconds if test.startswith(own) and test not in tests)]
    return in_order(room, tests, reach.seconds)


def in_order(room: str, tests: list[str], usual_s: dict[str, float]) -> list[str]:
    """Return the tests in the order to run them.

    Files stay together, as they share fixtures; the cheapest first, but those of the room before all.
    """
    own = own_tests(room)
    files: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)

    def cost(file: str) -> tuple[bool, float]:
        return not file.startswith(own), sum(usual_s[test] for test in files[file])

    return [test for file in sorted(files, key=cost) for test in files[file]]


def measure(copy: Copy, room: str, mutant: Mutant, tests: list[str], suite: str, usual_s: dict[str, float]) -> Found:
    """Plant it, and run these tests up to the first that fails."""
    name, began = f"{room}/{mutant.name}", time.monotonic()
    by, ran, loaded = None, 0, 0
    try:
        if tests:
            with copy.planted(mutant.texts()):
                by, ran, loaded = _first_to_fail(copy, tests, usual_s)
    except subprocess.CalledProcessError:
        by = COMPILER
    return Found(name, suite, mutant.digest, by, round(time.monotonic() - began, 1), ran, len(tests), loaded)


def measure_real(
    copy: Copy, mistake: RealMistake, suite: str, own: list[str], other: list[str], usual_s: dict[str, float]
) -> dict[str, object]:
    """Undo a commit, and run up to the first failure the tests that came with it, and then the others that reach it."""
    facts: dict[str, object] = {"commit": mistake.commit, "suite": suite, "whole": mistake.is_whole}
    facts |= {"message": mistake.message, "files": list(mistake.texts), "ran": [len(own), len(other)]}
    with copy.planted(mistake.texts):
        for name, tests in (("own", own), ("other", other)):
            facts[name] = _first_to_fail(copy, tests, usual_s)[0]
    return facts


def _first_to_fail(copy: Copy, tests: list[str], usual_s: dict[str, float]) -> tuple[str | None, int, int]:
    """Return the first that fails, how many ran, and how many processes loaded the mistake."""
    ran = loaded = 0
    for part in _parts(tests, usual_s):
        limit_s = 180 + 4 * sum(usual_s.get(test, 10.0) for test in part)
        result = copy.run(part, "-x", limit_s=limit_s, usual_s=usual_s)
        ran, loaded = ran + len(result.durations), loaded + result.loaded
        if result.failed:
            return result.failed[0], ran, loaded
    return None, ran, loaded


def _parts(tests: list[str], usual_s: dict[str, float]) -> list[list[str]]:
    """Split them in two: some that are over soon, and the rest."""
    first, total_s = 0, 0.0
    while first < len(tests) and total_s < FIRST_S:
        total_s += usual_s.get(tests[first], 10.0)
        first += 1
    return [part for part in (tests[:first], tests[first:]) if part]
