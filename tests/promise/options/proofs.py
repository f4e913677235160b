"""Whether an option does something, by comparing two runs of its verb, with the option and without it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from tests.promise.options.bases import BASES, BEFORE
from tests.promise.options.command_tree import ROOT_COMMAND, Option, without
from tests.promise.options.look import Line, Looker


@dataclass(frozen=True)
class Row:
    """A way to try an option whose values cannot be derived, or whose effect the verb's base command does not show."""

    verbs: str  # a pattern, such as "corpus *"
    option: str
    values: tuple[str, ...] = ()  # each the words after the option's name; none: those that are derived
    swap: tuple[str, str] = ("", "")  # one text for another in the base command
    plus: str = ""  # other words; without them the option must do something, or be refused
    base: str | None = None  # in place of the base command
    before: tuple[str, ...] = ()  # command lines that are run first, behind those of the verb
    env: tuple[tuple[str, str], ...] = ()
    has_own_process: bool = False
    ends: Literal["well", "in an error", "refused"] = "well"  # with the option; "refused" by its name
    without: Literal["well", "in an error"] = "well"  # how the command ends without the option
    alone: str = ""  # why it may do nothing without `plus`

    def fits(self, option: Option) -> bool:
        return self.option == option.name and fnmatchcase(option.verb, self.verbs)

    def line(self, option: Option, words: list[str]) -> Line:
        return Line(tuple(words), (*BEFORE.get(option.verb, ()), *self.before), self.env, self.has_own_process)


def tries(option: Option, row: Row) -> tuple[list[str], list[list[str]]]:
    """Return the words of the command without another value of the option, and those with each."""
    verb = [] if option.verb == ROOT_COMMAND else option.verb.split()
    line = BASES.get(option.verb) if row.base is None else row.base
    assert line is not None, f"add a row for `lmtrain {option.verb}` to tests/promise/options/bases.py"
    words = [*shlex.split(line.replace(*row.swap) if row.swap[0] else line), *shlex.split(row.plus)]
    rest, now = without(words, option)
    values = [shlex.split(value) for value in row.values] or option.other_values(now)
    assert values, f"{option}: no other value can be derived, add a row to tests/promise/options/rows.py"
    return [*verb, *words], [[*verb, option.name, *value, *rest] for value in values]


def problems(looker: Looker, option: Option, row: Row) -> Iterator[str]:
    """Yield a sentence for each value of the option that does nothing where the row says that it does."""
    base, others = tries(option, row)
    plain = looker.see(row.line(option, base))
    if (plain.code == 0) != (row.without == "well"):
        yield f"{option}: `lmtrain {shlex.join(base)}` does not end {row.without}, choose another base:\n{plain.text}"
    for words in others:
        seen = looker.see(row.line(option, words))
        typed = f"`lmtrain {shlex.join(words)}`"
        if row.ends == "refused":
            if seen.code == 0 or not is_named(option, seen.text):
                yield f"{option} is not refused by {typed}:\n{seen.text}"
        elif seen == plain:
            yield f"{option} is ignored by {typed}"
        elif seen.code != 0 and row.ends == "well":
            yield f"{option}: {typed} ends with exit code {seen.code}, add a row in which it acts:\n{seen.text}"
    if row.plus and not row.alone:
        yield from _ignored_alone(looker, option, replace(row, plus=""))


def _ignored_alone(looker: Looker, option: Option, row: Row) -> Iterator[str]:
    """Yield a sentence if the option, without the words that it needs, neither does anything nor is refused."""
    base, others = tries(option, row)
    for words in others:
        if looker.see(row.line(option, words)) == looker.see(row.line(option, base)):
            yield f"{option} is ignored by `lmtrain {shlex.join(words)}`, and not refused"


def is_named(option: Option, text: str) -> bool:
    return any(name in text for name in option.all_names)
