"""What is known of mistakes, kept beside this file: which test noticed each, and which drawn ones are nothing.

CI plants a few of the noticed ones again, and those tests must fail. What is nothing was read and judged: no input
makes a number, a file or an answer another. It stands there by its name, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

from tests.mutants.draw import Drawn, room_of
from tests.mutants.mutant import ROOT, DoesNotApplyError, Mutant, every_mutant
from tests.mutants.workers import in_copies

NOTICED = Path(__file__).with_name("noticed.json")
NOTICED_DRAWN = Path(__file__).with_name("noticed_drawn.json")
JUDGED = Path(__file__).with_name("judged.json")


def judged_as_nothing() -> set[str]:
    """Return the names of the drawn mistakes that are nothing."""
    return set(json.loads(JUDGED.read_text()))


def check_chosen(out: Path, count: int, copies: int) -> int:
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
    for entry in in_copies(out, copies, jobs):
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


def write_noticed(found: list[dict[str, Any]], mutants: dict[str, Mutant]) -> None:
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
