"""On a terminal of 80 columns lines end between words, and what goes on stands below its beginning."""

from __future__ import annotations

import pty
import re
import sys

import pytest
import yaml

from lmtrain.cli.screen.print_messages_and_json import print_notice, progress
from lmtrain.config.compose_run_settings import conf_dir
from lmtrain.config.settings_base import kinds
from lmtrain.optim.optim_settings import OptimSettings
from tests.cli.harness import lmtrain, on_terminal
from tests.unit.observe.test_training_view import drain

WRONG = ["pretrain", "data.path=data/doc", "model.num_heads=5", "optim.lrr=3e-4", "model.width=64"]


def test_a_refusal_breaks_between_words() -> None:
    shown, piped = on_terminal(*WRONG, code=2), lmtrain(*WRONG, code=2)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == piped.split()
    assert "\n     or set head_width." in shown  # below the text, not below its number
    assert len(piped.partition("\nType:")[0].splitlines()) == 3


def test_a_line_beside_a_progress_line_stands_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    host, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(terminal, "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with progress("working"):
            print_notice("a line of its own")
    assert re.search("\x1b\\[2Ka line of its own\r?\n", drain(host))


def test_what_is_to_be_typed_stays_on_one_line() -> None:
    """A shell reads a line that ends within quotes as another value."""
    shown = on_terminal("pretrain", "data.path=[data/one,data/another]", "run.dir=runs/of_a_long_name", code=2)
    assert '"data.datasets=[{path: data/one, epochs: 1}, {path: data/another, epochs: 1}]"' in shown


def test_a_long_comment_of_a_config_goes_on_below_itself() -> None:
    shown = on_terminal("config", "show", "model", "gpt_tiny")
    assert max(map(len, shown.splitlines()[1:])) <= 80
    file = conf_dir() / "model/gpt_tiny.yaml"
    assert yaml.safe_load(shown) == yaml.safe_load(file.read_text())
    assert re.search(r"^ {27}# num_heads$", shown, re.MULTILINE)
    assert file.read_text() in lmtrain("config", "show", "model", "gpt_tiny")


def test_kinds_that_have_a_key_are_a_sentence() -> None:
    *most, last = kinds(OptimSettings)
    said = " ".join(lmtrain("config", "explain", "optim.lr").split())
    assert f"number, where optim.kind is {', '.join(most)} or {last}" in said


@pytest.mark.parametrize(("typed", "meant"), [("pretrian", "pretrain"), ("inspekt", "inspect"), ("evall", "eval")])
def test_a_misspelt_verb(typed: str, meant: str) -> None:
    said = lmtrain(typed, "optim.lr=1", code=2)
    assert f"lmtrain {typed} is not a command. Did you mean {meant}?\n" in said
    assert f"\n  lmtrain {meant} optim.lr=1" in said
