"""`--help` of every verb is in plain words and fits its terminal; its examples are commands that work."""

from __future__ import annotations

import re
import subprocess
import sys
from time import monotonic
from typing import Any

import pytest
from typer.main import get_command

from lmtrain.cli.main import app
from lmtrain.cli.pretrain.print_dry_run_and_summary import EXAMPLES
from lmtrain.cli.reference import cli_page, list_commands
from lmtrain.cli.subcommands import HELP, WATCHERS, build_verb, print_still_at_work
from lmtrain.runtime.processes import command_watch
from tests.cli.harness import lmtrain

VERBS = ["lmtrain", *sorted({*(found := list_commands(get_command(app))), *(verb.rsplit(" ", 1)[0] for verb in found)})]
NOT_PLAIN = re.compile(
    r"<[a-z]|\b(?:INTEGER|FLOAT|BOOLEAN|RANGE|Optional|Annotated|Union|NoneType|PosixPath|Sequence)\b|\bx[<>]=|"
    r"\b(?:list|tuple|dict)\[|\bNone\b|\bbool\b|\bstr\b|\{[A-Z]|…"
)


def test_the_longest_helps_are_in_plain_words_and_fit() -> None:
    check_helps(80, ["lmtrain", "lmtrain pretrain", "lmtrain preprocess"])


@pytest.mark.wide
@pytest.mark.parametrize("width", [80, 120])
def test_every_help_is_in_plain_words_and_fits(width: int) -> None:
    check_helps(width, VERBS)


def check_helps(width: int, verbs: list[str]) -> None:
    problems = []
    for verb in verbs:
        text = lmtrain(*verb.split()[1:], "--help", env={"COLUMNS": str(width)})
        problems += [f"{verb}: {line}" for line in text.splitlines() if NOT_PLAIN.search(line) or len(line) > width]
        assert "Usage: " in text
    assert not problems, "\n" + "\n".join(problems)


def test_examples_of_pretrain_are_in_its_help_and_in_the_reference() -> None:
    """Of a page, another test judges the settings of every command."""
    text = " ".join(lmtrain("pretrain", "--help").split())
    page = cli_page(app)
    for command, what in EXAMPLES:
        assert f"{command}: {what}" in text
        assert f"$ {command}  # {what}\n" in page


def test_the_list_of_verbs_says_what_each_of_them_says() -> None:
    assert {name: " ".join(build_verb(name).help.split("\n\n")[0].split()) for name in HELP} == HELP


@pytest.mark.wide
def test_python_m_lmtrain() -> None:
    done = subprocess.run([sys.executable, "-m", "lmtrain", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("lmtrain ")


@pytest.mark.parametrize("words", sorted(verb.removeprefix("lmtrain ") for verb in list_commands(get_command(app))))
def test_every_verb_says_after_a_while_that_it_is_at_work(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it does, and without a line of its own; so does a verb that is added."""
    name, _, sub = words.partition(" ")
    command = build_verb(name)
    command = command.commands[sub] if sub else command
    lines: list[Any] = []
    monkeypatch.setattr(command, "callback", lambda **options: lines.extend(command_watch._lines))
    command.invoke(command.context_class(command))
    assert [line is None for line in lines] == [words in WATCHERS]


def test_the_line_of_a_silent_verb_is_printed_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_still_at_work("corpus clean", monotonic() - 65.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    print_still_at_work("corpus clean", monotonic() - 65.0)
    assert capsys.readouterr().err == "lmtrain corpus clean: at work, 1m05s elapsed\n"
