"""What files and names hold is shown on a terminal, and never obeyed or read as markup."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lmtrain.cli.screen.print_facts_and_tables import PlainConsole
from lmtrain.runtime.terminal_safe_text import escape_control_characters
from tests.cli.harness import Toy, lmtrain, outcome

HOSTILE = "a[/b][red]\x1b[2J\x9b31m\u202e:smile:"
SHOWN = "a[/b][red]\\u001b[2J\\u009b31m\\u202e:smile:"
OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def test_what_moves_a_terminal_is_shown() -> None:
    assert escape_control_characters(HOSTILE) == SHOWN
    assert escape_control_characters("a\tb\nc\r\nd\re\udcff\u2066") == "a\tb\nc\r\nd\\u000de\\udcff\\u2066"
    others = "caf\u00e9 \u05e9\u05dc\u05d5\u05dd \u200d\U0001f600"
    assert escape_control_characters(others) == others


@settings(max_examples=50)
@given(st.text(st.characters(exclude_categories=()) | st.sampled_from("\x1b\x9b\u202e\\\"")))
def test_json_stays_the_same_json(text: str) -> None:
    shown = escape_control_characters(json.dumps({"a": text}, ensure_ascii=False))
    assert not OBEYED.search(shown)
    assert json.loads(shown) == {"a": text}


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_and_texts_are_no_markup_and_no_commands(terminal: bool) -> None:
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold"))
    out = io.StringIO()
    screen = PlainConsole(file=out, force_terminal=terminal, width=200, highlight=False)
    for one in (HOSTILE, Text(HOSTILE), table, Panel(HOSTILE, title=Text(HOSTILE))):
        screen.print(one)
    said = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # colours, which are rich's own
    assert not OBEYED.search(said.replace("\n", ""))
    assert said.count(SHOWN) == 7


@pytest.fixture(scope="module")
def hostile(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names") / HOSTILE
    folder.mkdir(parents=True)
    for file in toy.data.parent.glob("toy.*"):
        shutil.copy(file, folder)
    return folder / "toy"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["data", "inspect", "{}"], 0), (["inspect", "--all", "{}"], 0), (["data", "stats", "{}"], 0),
        (["data", "show", "{}", "--document", 0], 0), (["data", "verify", "{}"], 0), (["data", "show", "{}x"], 66),
        (["pretrain", "--dry-run", "data.path='{}'", "run.dir='{}run'"], 0),
        (["pretrain", "--print-config", "data.path='{}'", "optim.lrr='{}'"], 2),
        (["pretrain", "--config-dir", "{}", "data.path=x"], 66), (["inspect", "{}nowhere"], 66),
        (["tokenizer", "show", "{}.tokenizer.json", HOSTILE], 0), (["{}"], 2), (["pretrain", "--{}"], 2),
        (["preprocess", "{}.json", "--tokenizer", "{}.tokenizer.json", "--output", "{}"], 2),
        (["tokenizer", "train", "{}\udcff", "--output", "x", "--vocab-size", 300], 66),
    ],
    ids=lambda given: " ".join(map(ascii, given))[:40] if isinstance(given, list) else str(given),
)  # fmt: skip
def test_names_and_texts_reach_the_terminal_escaped(hostile: Path, words: list[Any], code: int) -> None:
    found, said = outcome(*(str(word).replace("{}", str(hostile)) for word in words))
    assert found == code, ascii(said)
    assert "Traceback" not in said
    assert not OBEYED.search(said.replace("\n", "")), ascii(said)


def test_json_is_escaped_as_json_is(hostile: Path) -> None:
    assert SHOWN in lmtrain("inspect", f"{hostile}x", code=66)
    said = lmtrain("inspect", hostile, "--json")
    assert not OBEYED.search(said.replace("\n", ""))
    assert json.loads(said)["dataset"] == str(hostile)
