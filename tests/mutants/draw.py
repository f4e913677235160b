"""Draw mistakes that nobody chose: by a seed, with equal weight for rooms, and in a room for its statements.

What can be drawn is what operators.py makes of Python and what stands here for C++. A drawn mistake keeps its name, a
digest of the statement and the change, wherever its code moves in its function.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
from dataclasses import dataclass
from functools import cache

from tests.mutants import operators
from tests.mutants.mutant import ROOT, DoesNotApplyError, Mutant
from tests.mutants.operators import Change, Statement

# neighbouring floors, in which shares are told apart
GROUPS = {
    "ground": ("lmtrain", "runtime", "kernels", "config"),
    "data": ("runfolder", "observe", "schedules", "tokenizer", "data", "data_tools"),
    "model": ("models", "optim", "placement", "parallel", "checkpoint", "plan"),
    "applications": ("train", "eval", "exchange"),
    "doors": ("start", "cli", "api"),
    "csrc": ("csrc",),
}
_SLIPS = {
    "comparison": {r" < ": " <= ", r" <= ": " < ", r" > ": " >= ", r" >= ": " > ", r" == ": " != ", r" != ": " == "},
    "and or or": {r" && ": " || ", r" \|\| ": " && "},
    "operator": {
        r" \+ ": " - ", r" - ": " + ", r" \* ": " + ", r" / ": " * ", r" % ": " / ", r" << ": " >> ", r" >> ": " << ",
        r" \| ": " & ", r" & ": " | ", r" \^ ": " | ", r" \+= ": " -= ", r" \|= ": " = ", r" \^= ": " |= ",
    },
    "not": {r"!(?=[\w(])": ""},
    "function": {r"std::min\b": "std::max", r"std::max\b": "std::min"},
    "constant": {r"\btrue\b": "false", r"\bfalse\b": "true"},
    "statement dropped": {
        r"(?<=^)(\s*)(?!return|const|auto|static|using|py::)[\w.>\[\]-]+(\([^;]*\)| [-+|&^]?= [^;]*|\+\+|--);$": r"\1;",
        r"\b(continue|break);": ";",
    },
}  # fmt: skip
_NO_STATEMENT = ("#", "*", "/*", "using ", "template", "namespace")
_NUMBER = re.compile(r"(?<![\w.'\"<])\d+(?![\w.'\"])")


@dataclass(frozen=True, kw_only=True)
class Drawn(Mutant):
    """A drawn mistake: where `old` stands in a statement, which is number `count` of its like in the function."""

    kind: str
    statement: str
    count: int

    def begin(self, text: str) -> int:
        places = _places(self.file, text, self.function, self.statement)
        if not (self.count < len(places) and text.startswith(self.old, places[self.count])):
            raise DoesNotApplyError(f"{self.name}: {self.file} has its statement {len(places)} times.")
        return places[self.count]

    def change(self) -> tuple[str, str]:
        """Return what differs, before and after."""
        same = 0
        while same < min(len(self.old), len(self.new)) and self.old[same] == self.new[same]:
            same += 1
        rest = 0
        while rest < min(len(self.old), len(self.new)) - same and self.old[-1 - rest] == self.new[-1 - rest]:
            rest += 1
        return self.old[same : len(self.old) - rest], self.new[same : len(self.new) - rest]


def draw(seed: str, count: int, room: str = "") -> list[Drawn]:
    """Draw so many mistakes, of one room or of all."""
    chance = random.Random(seed)
    rooms = [room] if room else sorted(rooms_with_code())
    found: dict[str, Drawn] = {}
    while len(found) < count:
        file, text, statement = chance.choice(_statements_in(chance.choice(rooms)))
        kind = chance.choice(sorted({change.kind for change in statement.changes}))
        change = chance.choice([change for change in statement.changes if change.kind == kind])
        mutant = _drawn(file, text, statement, change)
        found.setdefault(mutant.name, mutant)
    return list(found.values())


def room_of(file: str) -> str:
    """Return the room of a file: a folder of lmtrain, or "lmtrain" for what stands in none; data_tools and csrc."""
    parts = file.split("/")
    return parts[1] if parts[0] == "lmtrain" and len(parts) > 2 else parts[0]


def group_of(room: str) -> str:
    return next(group for group, rooms in GROUPS.items() if room in rooms)


def _drawn(file: str, text: str, statement: Statement, change: Change) -> Drawn:
    begin, end = min(statement.begin, change.begin), max(statement.end, change.end)
    old = text[begin:end]
    new = text[begin : change.begin] + change.new + text[change.end : end]
    said = text[statement.begin : statement.end]
    count = _places(file, text, statement.function, said).index(begin)
    told = "\0".join((file, statement.function, said, old, new, str(count)))
    name = hashlib.sha256(told.encode()).hexdigest()[:12]
    return Drawn(name=name, file=file, function=statement.function, old=old, new=new, breaks="", kind=change.kind,
                 statement=said, count=count)  # fmt: skip


@cache
def rooms_with_code() -> dict[str, list[str]]:
    """Return the files of each room from which mistakes are drawn."""
    rooms: dict[str, list[str]] = {}
    has_triton = importlib.util.find_spec("triton") is not None
    for root, pattern in (("lmtrain", "*.py"), ("data_tools", "*.py"), ("csrc", "*.cpp"), ("csrc", "*.h")):
        for path in sorted((ROOT / root).rglob(pattern)):
            file = str(path.relative_to(ROOT))
            if "/fuzz/" in file or path.name == "unicode_tables.h" or (path.name[:7] == "triton_" and not has_triton):
                continue
            rooms.setdefault(room_of(file), []).append(file)
    return rooms


@cache
def _statements_in(room: str) -> list[tuple[str, str, Statement]]:
    texts = [(file, (ROOT / file).read_text()) for file in rooms_with_code()[room]]
    return [(file, text, statement) for file, text in texts for statement in _statements_of(file, text)]


def _places(file: str, text: str, function: str, said: str) -> list[int]:
    """Return where statements of these words begin in a function."""
    return [each.begin for each in _statements_of(file, text)
            if each.function == function and text[each.begin : each.end] == said]  # fmt: skip


@cache
def _statements_of(file: str, text: str) -> list[Statement]:
    return operators.statements(text) if file.endswith(".py") else lines_of_cpp(text)


def lines_of_cpp(text: str) -> list[Statement]:
    """Return the lines of C++ that some slip can change."""
    found, begin, is_comment = [], 0, False
    for line in text.splitlines():
        code = line.partition("//")[0].rstrip()
        is_comment = (is_comment or "/*" in code) and "*/" not in code
        if code and not is_comment and not code.lstrip().startswith(_NO_STATEMENT):
            statement = Statement("", begin, begin + len(code))
            for kind, slips in _SLIPS.items():
                for pattern, other in slips.items():
                    for match in re.finditer(pattern, code):
                        changed = Change(kind, begin + match.start(), begin + match.end(), match.expand(other))
                        statement.changes.append(changed)
            for match in _NUMBER.finditer(code):
                new = str(int(match.group()) + 1)
                statement.changes.append(Change("constant", begin + match.start(), begin + match.end(), new))
            if statement.changes and "module.def" not in code and '"' not in code:
                found.append(statement)
        begin += len(line) + 1
    return found
