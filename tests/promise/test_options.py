"""No option of a verb is taken and then ignored: each changes what is printed or written, or is refused.

Verbs and options are found by walking the commands. What cannot be derived from an option's type is in the table of
tests/promise/options/rows.py, and a command line for each verb in bases.py beside it.
"""

from __future__ import annotations

import shlex
import sys
import types
from pathlib import Path
from typing import Annotated

import pytest
import typer

from lmtrain.cli import subcommands
from tests.promise.options.bases import BASES, BEFORE
from tests.promise.options.command_tree import Option, every_option, every_verb
from tests.promise.options.look import Line, Looker
from tests.promise.options.proofs import Row, problems, tries
from tests.promise.options.rows import ROWS, UNSEEN, rows_of
from tests.promise.options.small_world import World

QUICK = ("config list --json", "config show --json", "lmtrain --version", "plan --top")


@pytest.fixture(scope="session")
def looker(world: World) -> Looker:
    return Looker(world)


def tried() -> list[object]:
    seen = [option for option in every_option() if (option.verb, option.name) not in UNSEEN]
    return [pytest.param(one, id=str(one), marks=[pytest.mark.wide] * (str(one) not in QUICK)) for one in seen]


@pytest.mark.parametrize("option", tried())
def test_an_option_does_something(looker: Looker, option: Option) -> None:
    assert [problem for row in rows_of(option) for problem in problems(looker, option, row)] == []


def test_every_option_has_another_value_and_every_row_an_option() -> None:
    options = every_option()
    for option in options:
        if (option.verb, option.name) not in UNSEEN:
            assert all(tries(option, row)[1] for row in rows_of(option))
    used = {id(row) for option in options for row in rows_of(option)}
    assert [row for row in ROWS if id(row) not in used] == []
    assert UNSEEN.keys() <= {(option.verb, option.name) for option in options}
    assert set(BASES) == {"lmtrain", *(verb for verb, _ in every_verb())}


@pytest.mark.wide
@pytest.mark.parametrize("verb", [verb for verb in BASES if verb not in ("demo", "lmtrain")])
def test_the_same_command_looks_the_same(looker: Looker, verb: str) -> None:
    """Else a difference would prove nothing."""
    line = Line((*verb.split(), *shlex.split(BASES[verb])), BEFORE.get(verb, ()))
    assert looker.see(line) == looker.look(line)


def greet(
    mute: Annotated[bool, typer.Option("--mute", help="Print nothing.")] = False,
    louder: Annotated[bool, typer.Option("--louder", help="Print more.")] = False,
    name: Annotated[str, typer.Option(help="Whom to greet.")] = "you",
) -> None:
    """Greet."""
    print("hello" + "!" * louder)


def test_an_option_that_is_ignored_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a verb: its options are found without being listed, and the one without an effect is told."""
    module = types.ModuleType("lmtrain.cli.greet_command")
    vars(module)["greet"] = greet
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(subcommands.HELP, "greet", "Greet.")
    monkeypatch.setitem(subcommands._FILES, "greet", "greet_command")
    options = {option.name: option for option in every_option() if option.verb == "greet"}
    looker = Looker(World(tmp_path / "world"))
    with pytest.raises(AssertionError, match="add a row for `lmtrain greet`"):
        list(problems(looker, options["--mute"], Row("greet", "--mute")))
    monkeypatch.setitem(BASES, "greet", "")
    found = {name: list(problems(looker, options[name], Row("greet", name))) for name in ("--mute", "--louder")}
    assert found == {"--mute": ["greet --mute is ignored by `lmtrain greet --mute`"], "--louder": []}
    with pytest.raises(AssertionError, match="greet --name: no other value can be derived, add a row"):
        list(problems(looker, options["--name"], Row("greet", "--name")))
