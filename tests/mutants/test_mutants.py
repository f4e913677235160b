"""Mutants can be planted in the code of today, and the statement that each changes is found."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from tests.mutants import places
from tests.mutants.hook import with_notes
from tests.mutants.mutant import DoesNotApplyError, Mutant, mutants_of, room_names
from tests.mutants.record import calls_of_helper

SOURCE = """
LIMIT = 3


@cached
def head(a, b=1):
    "Says what it does."
    if a:
        return b
    elif b > LIMIT:
        a = [
            each
            for each in b
        ]
    try:
        a.run()
    except OSError:
        a.stop()
    else:
        a.go()
    return a


class Box:
    size = 4

    def grow(self):
        self.size += 1
"""


@pytest.mark.parametrize("room", room_names())
def test_every_mutant_applies(room: str) -> None:
    found = mutants_of(room)
    assert len({mutant.name for mutant in found}) == len(found)
    for mutant in found:
        mutant.check()


def _mutant(folder: Path, old: str, function: str = "") -> Mutant:
    (folder / "file.py").write_text(SOURCE)
    return Mutant(name="here", file="file.py", function=function, old=old, new="other", breaks="it")


@pytest.mark.parametrize(
    ("old", "begins"),
    [
        ("LIMIT = 3", None),  # runs once, as the module is imported
        ("size = 4", None),
        ("b=1", "if a:"),  # a default is met by whoever calls
        ("@cached", "if a:"),
        ("return b", "return b"),
        ("b > LIMIT", "elif b > LIMIT:"),
        ("for each in b", "a = ["),
        ("a.run()", "a.run()"),
        ("    except OSError:\n", "try:"),
        ("a.run()\n    except OSError", "try:"),
        ("a.stop()", "a.stop()"),
        ("a.go()\n    return a", "try:"),
        ("self.size += 1", "self.size += 1"),
    ],
)
def test_the_statement_that_a_mutant_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, begins: str | None
) -> None:
    monkeypatch.setattr(places, "ROOT", tmp_path)
    place = places.statement(_mutant(tmp_path, old))
    lines = SOURCE.splitlines()
    assert (place and lines[place[0] - 1][place[1] :]) == begins


def test_old_text_that_is_gone_or_there_twice_is_refused(tmp_path: Path) -> None:
    for old, function in (("b", "head"), ("nothing", "head"), ("LIMIT = 3", "Box"), ("size", "gone")):
        with pytest.raises(DoesNotApplyError):
            _mutant(tmp_path, old, function).check(tmp_path)


def test_a_function_notes_who_comes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    monkeypatch.setattr(builtins, "__reached__", came.append, raising=False)
    source = "def f(a):\n    if a:\n        return 1\n    elif a is None:\n        return 2\n    return 3\n"
    found: dict[str, object] = {}
    exec(compile(with_notes(source.encode(), [[3, 8, 7], [4, 4, 8], [6, 4, 9]]), "file", "exec"), found)  # noqa: S102
    f = found["f"]
    assert callable(f)
    assert (f(1), f(None), f(0)) == (1, 2, 3)
    assert came == [7, 8, 8, 9]


def test_the_callers_of_the_compiled_helper_are_found() -> None:
    files = {file.rpartition("/")[2] for file, _ in calls_of_helper()}
    assert {"crc32c.py", "bulk_encoding.py", "masked_language_samples.py", "text_from_json_lines.py"} <= files
