"""`--help` of every verb is in plain words and fits its terminal; its examples are commands that work."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.main import get_command

from lmtrain.cli.main import app
from lmtrain.cli.pretrain.print_dry_run_and_summary import EXAMPLES
from lmtrain.cli.reference import cli_page, list_commands
from lmtrain.cli.subcommands import HELP, build_verb
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
