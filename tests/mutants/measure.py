"""Find the test that notices a planted mistake: run those that reach it, the room's own first, until one fails."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass

from tests.mutants.copies import Copy
from tests.mutants.mutant import Mutant, every_mutant
from tests.mutants.record import Reach

# where a room's own tests are, if not in tests/unit/ROOM
OWN = {
    "cli": ("tests/cli/",), "start": ("tests/cli/",),
    "conf": ("tests/unit/config/", "tests/contracts/", "tests/unit/plan/test_hardware.py"),
    "config": ("tests/unit/config/", "tests/mistakes/"),
    "csrc": ("tests/unit/runtime/", "tests/unit/tokenizer/", "tests/unit/data_tools/", "tests/unit/data/"),
    "data_tools": ("tests/unit/data_tools/",), "objectives": ("tests/unit/models/objectives/",),
    "parallel": ("tests/unit/parallel/", "tests/layouts/"),
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Result for one mutant and one suite."""

    mutant: str  # ROOM/NAME
    suite: str
    digest: str  # of the mutant: a changed one is measured anew
    by: str | None  # the test that noticed it
    seconds: float  # until then, or of all
    ran: int  # tests
    reach: int  # tests that come by; -1 where that is not known
    loaded: int  # processes that loaded the file with the mistake

    def as_facts(self) -> dict[str, object]:
        return asdict(self)


def candidates(room: str, name: str, reach: Reach) -> tuple[list[str], bool]:
    """Return the tests to run in order, and whether it is known that no other comes by.

    Files stay together, as they share fixtures; the cheapest first, but those of the room before all.
    """
    own = OWN.get(room, (f"tests/unit/{room}/",))
    known = name in reach.reached
    tests = reach.tests_of(name) if known else [test for test in reach.seconds if test not in reach.failed]
    if every_mutant()[name].file.endswith(".yaml"):
        # because: what was composed once is remembered, and its files are not opened again
        own = (*own, *OWN["conf"])
        tests = [*tests, *(test for test in reach.seconds if test.startswith(own) and test not in tests)]
    files: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)

    def cost(file: str) -> tuple[bool, float]:
        return not file.startswith(own), sum(reach.seconds[test] for test in files[file])

    return [test for file in sorted(files, key=cost) for test in files[file]], known


def measure(copy: Copy, room: str, mutant: Mutant, tests: list[str], suite: str, known: bool, reach: Reach) -> Found:
    """Plant it, and run these tests up to the first that fails."""
    facts = {"mutant": f"{room}/{mutant.name}", "suite": suite, "digest": mutant.digest}
    number = len(tests) if known else -1
    if not tests:
        return Found(**facts, by=None, seconds=0.0, ran=0, reach=number, loaded=0)
    limit_s = 180 + 4 * sum(reach.seconds.get(test, 10.0) for test in tests)
    with copy.planted(mutant):
        ran = copy.run(tests, "-x", limit_s=limit_s)
    by = ran.failed[0] if ran.failed else None
    return Found(**facts, by=by, seconds=round(ran.seconds, 1), ran=len(ran.durations), reach=number, loaded=ran.loaded)
