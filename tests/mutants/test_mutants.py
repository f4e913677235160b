"""Mutants can be planted in the code of today, and the statement that each changes is found."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

import pytest

from tests.mutants import operators, places
from tests.mutants.draw import GROUPS, draw, lines_of_cpp, rooms_with_code
from tests.mutants.hook import with_flags
from tests.mutants.mutant import ROOT, DoesNotApplyError, Mutant, mutants_of, room_names
from tests.mutants.numbering import Numbering, callers_of_helper, keys_and_places, users_of_names
from tests.mutants.table import interval

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


def test_a_statement_that_runs_sets_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """\
def f(a):
    "Says it."
    if a:
        return 1
    elif a is None:
        return 2
    return 3
"""
    lines = [line for _, (line, _) in keys_and_places(source)]
    flags = bytearray(2 + len(lines))
    monkeypatch.setattr(builtins, "__flags__", flags, raising=False)
    found: dict[str, object] = {}
    exec(compile(with_flags(source.encode(), 2), "file", "exec"), found)  # noqa: S102
    f = found["f"]
    assert callable(f)
    for given, passed in ((1, {3, 4}), (None, {3, 5, 6}), (0, {3, 5, 7})):
        flags[:] = bytes(len(flags))
        f(given)
        assert {lines[index - 2] for index in range(len(flags)) if flags[index]} == passed
    assert f.__doc__ == "Says it."


def test_a_statement_keeps_its_number_while_others_change() -> None:
    before, now = SOURCE, SOURCE.replace("LIMIT = 3", "LIMIT = 3\nMORE = 4").replace("a.go()", "a.gone()")
    known = Numbering({"file.py": (10, [key for key, _ in keys_and_places(before)])})
    places = dict(keys_and_places(before))
    for key, (line, _) in keys_and_places(now):
        numbers = known.numbers("file.py", [key])
        lines = {places[known.files["file.py"][1][number - 10]][0] for number in numbers}
        # one that is new is all its function
        assert lines == {line - 1} or (len(lines) > 3 and "a.gone()" in key)
    assert known.numbers("other.py", ["f|x|1"]) == []


def test_the_callers_of_the_compiled_helper_are_found() -> None:
    files = {file.rpartition("/")[2] for file in callers_of_helper("csrc/bpe.cpp")}
    assert {"crc32c.py", "bulk_encoding.py", "masked_language_samples.py", "text_from_json_lines.py"} <= files
    assert len(callers_of_helper("csrc/crc32c.cpp")) < len(files) / 2


def test_who_uses_a_constant_comes_by_its_mistake() -> None:
    files = set(users_of_names({"_MAX_DIVISOR"}))
    assert files == {"lmtrain/layout.py"}


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("x = a < b", {"x = a <= b", "x = a < b + 1", "x = a < b - 1"}),
        ("x = a and not b", {"x = a or not b", "x = (a)", "x = ((not b))", "x = a and (b)"}),
        ("x = min(a, 3)", {"x = max(a, 3)", "x = min(a, 4)", "x = min(a, 2)", "x = (a)", "x = (3)"}),
        ("x = b if a else c", {"x = b if not (a) else c", "x = (b)", "x = (c)"}),
        ("x = f(a, key=b)", {"x = f(a, )"}),
        ("x = (a, b)", {"x = (a,)", "x = (b,)"}),
        ("x = {'a': b, 'c': d}", {"x = {'c': d}", "x = {'a': b, }", "x = {'c': b, 'c': d}", "x = {'a': b, 'a': d}"}),
        ("x = a.tp_rank", {"x = a.pp_rank", "x = a.dp_rank"}),
        ("x = a[i:]", {"x = a[i + 1:]", "x = a[i - 1:]", "x = a[:]"}),
        ("if a:\n    raise b", {"if not (a):\n    raise b", "pass", "if a:\n    pass"}),
        ("a.b = 1\na.c = d", {"a.b = 2\na.c = d", "a.b = 0\na.c = d", "pass\na.c = d", "a.b = 1\npass"}),
        ("f()\ng()", {"pass\ng()", "f()\npass", "g()\nf()"}),
        ("x: int = f'{a + 1} w'", {f"x: int = f'{{{sum_}}} w'" for sum_ in ("a - 1", "a + 2", "a + 0", "a", "(1)")}),
        ("assert a < b", set()),
        ("tell('some words', help=1)", {"pass"}),
    ],
)  # fmt: skip
def test_the_slips_of_a_statement(source: str, made: set[str]) -> None:
    text = "def f():\n" + "".join(f"    {line}\n" for line in source.splitlines())
    found = set()
    for statement in operators.statements(text):
        for change in statement.changes:
            changed = text[: change.begin] + change.new + text[change.end :]
            ast.parse(changed)
            found.add("\n".join(line[4:] for line in changed.splitlines()[1:]))
    assert found == made


def test_a_draw_is_the_seeds_and_all_of_it_applies() -> None:
    for room in ("optim", "schedules"):
        drawn = draw("a seed", 20, room)
        assert [mutant.name for mutant in drawn] == [mutant.name for mutant in draw("a seed", 20, room)]
        assert len({mutant.file for mutant in drawn}) > 2
        for mutant in drawn:
            mutant.check()
            text = (ROOT / mutant.file).read_text()
            assert mutant.applied(text) != text


def test_lines_of_cpp_and_their_slips() -> None:
    text = "// a < b\nint f(int a) {\n  if (a < 3 && !b) return a + 1;\n  count += a;\n}\n"
    made = {text[: c.begin] + c.new + text[c.end :] for line in lines_of_cpp(text) for c in line.changes}
    lines = {changed.splitlines()[2].strip() for changed in made} - {"if (a < 3 && !b) return a + 1;"}
    assert lines == {
        "if (a <= 3 && !b) return a + 1;", "if (a < 4 && !b) return a + 1;", "if (a < 3 || !b) return a + 1;",
        "if (a < 3 && b) return a + 1;", "if (a < 3 && !b) return a - 1;", "if (a < 3 && !b) return a + 2;",
    }  # fmt: skip
    assert {changed.splitlines()[3] for changed in made} == {"  count += a;", "  count -= a;", "  ;"}


def test_every_room_is_of_one_group() -> None:
    assert sorted(room for rooms in GROUPS.values() for room in rooms) == sorted(rooms_with_code())


def test_the_interval_of_a_share() -> None:
    low, high = interval(27, 30)
    assert (round(low, 3), round(high, 3)) == (0.744, 0.965)
    assert interval(0, 0) == (0, 1)
