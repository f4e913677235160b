"""Mistakes are answered in words that name what is wrong and what to do, and what an answer advises works when typed.

Those written by hand are chosen for what they are about; the others are drawn from a grammar of wrong lines, over every
verb, option and setting: `python -m tests.mistakes` draws them by the thousand.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer

from lmtrain.cli import subcommands
from lmtrain.config.name_suggestions import types_by_key
from lmtrain.config.settings_base import add_plugin, plugins
from lmtrain.train.run_config import RunConfig
from tests.mistakes import grammar
from tests.mistakes.__main__ import try_lines
from tests.mistakes.grammar import Line
from tests.mistakes.mistake import CODES, Mistake, first_sentence, problem_of
from tests.mistakes.runner import Outcome, Runner
from tests.mistakes.typist import RAW, shown_line, try_line
from tests.mistakes.world import LACKING, make_world, right_line
from tests.mistakes.written import written

SEED = 12
NUM_COMPOSING, NUM_OTHERS = 3, 16  # in `make test`; the others take next to no time
NUM_DRAWN = 700
SHARES = 4  # of the drawn lines, so that they run at once


@cache
def every() -> list[Mistake]:
    return written()


def marked() -> list[object]:
    """A few for `make test`, the rest for `make test-all`."""
    mistakes, rng = every(), random.Random(SEED)
    composing = [number for number, mistake in enumerate(mistakes) if mistake.words[0] == "pretrain"]
    others = [number for number in range(len(mistakes)) if number not in composing]
    fast = {*rng.sample(composing, NUM_COMPOSING), *rng.sample(others, NUM_OTHERS)}
    return [
        pytest.param(mistake, id=mistake.name, marks=() if number in fast else pytest.mark.wide)
        for number, mistake in enumerate(mistakes)
    ]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("nothing") / "here") as made:
        yield made


@pytest.mark.parametrize("mistake", marked())
def test_a_mistake_is_met(mistake: Mistake, runner: Runner, tmp_path: Path) -> None:
    said = runner(mistake.at(tmp_path), mistake.env)
    text = said.text
    assert said.code == mistake.code, text
    assert said.code in CODES
    assert not said.torch
    assert text.startswith("error: "), text
    assert not [raw for raw in RAW if raw in text], text
    for asked in mistake.says:
        assert asked.replace("{here}", str(tmp_path)) in text, (asked, text)
    assert shown_line(text) or len(problem_of(text)) > len(first_sentence(text)) + 3, f"no way out: {text}"

    after = shown_line(text) or mistake.at(tmp_path)
    if mistake.mended is not None:
        mistake.write(tmp_path, mistake.mended)
    elif mistake.instead is not None:
        after = [word.replace("{here}", str(tmp_path)) for word in mistake.instead]
    else:
        assert shown_line(text), f"nothing to type: {text}"
    further = runner(after, mistake.env)
    assert first_sentence(text) not in further.text, (after, further.text)
    assert not [raw for raw in RAW if raw in further.text], further.text
    if mistake.code_after is not None:
        assert further.code == mistake.code_after, (after, further.text)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("mistakes") / "world")


@pytest.mark.wide
def test_the_right_lines_are_right(world: Path) -> None:
    with Runner(world) as run:
        refused = [
            " ".join(name) for name, command in grammar.verbs().items()
            if not run(right_line(name, command)).is_accepted
        ]  # fmt: skip
    assert refused == list(LACKING)


@pytest.mark.wide
@pytest.mark.parametrize("share", range(SHARES))
def test_what_answers_advise_works_when_it_is_typed(share: int, world: Path) -> None:
    trials = try_lines(world, f"{SEED}/{share}", NUM_DRAWN // SHARES)
    wrong = [str(trial) for trial in trials if trial.faults]
    assert not wrong, f"{len(wrong)} of {len(trials)}\n" + "\n".join(wrong[:5])
    assert sum(trial.end == "accepted" for trial in trials) > len(trials) / 4


def test_new_verbs_options_and_settings_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("lmtrain.cli.planted_command")

    def planted(data: str, size: int = typer.Option(3, "--planted-size")) -> None:
        """A planted verb."""

    vars(module)["planted"] = planted
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(subcommands.HELP, "planted", "A planted verb.")
    monkeypatch.setitem(subcommands._FILES, "planted", "planted_command")
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = dict(plugins)
    for cached in (grammar.verbs, grammar.settings):
        cached.cache_clear()
    try:
        add_plugin("tests.plugin_example")
        verb = ("planted",)
        assert right_line(verb, grammar.verbs()[verb])[0] == "planted"
        words = {word for n in range(200) for word in grammar.wrong_option_value(
            Line(verb, verb), random.Random(n)).words}  # fmt: skip
        assert any(word.startswith("--planted-size") for word in words)
        assert len(grammar.settings()) > 100
        new = {key for key in grammar.settings() if key not in _settings_without(known)}
        assert new
    finally:
        plugins.clear()
        plugins.update(known)
        for cached in (grammar.verbs, grammar.settings):
            cached.cache_clear()


def _settings_without(known: dict[str, list[ModuleType]]) -> set[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name in set(plugins) - set(known):
            patch.delitem(plugins, name)
        return set(types_by_key(RunConfig))


def _trial(
    *answers: str, line: tuple[str, ...] = ("pretrain", "data.text=a,b"), kept: tuple[str, ...] = ()
) -> list[str]:
    """The faults that the typist finds in these answers, of which the last is that of an accepted command."""
    outcomes = [
        Outcome(2, f"error: {said}\n", is_accepted=False, ways=[[(["x=1"], [], False)]]) for said in answers[:-1]
    ] + [Outcome(0, "", is_accepted=True, values=answers[-1].split())]
    return try_line(lambda words: outcomes.pop(0), Line(line, ("pretrain",), kept=kept), random.Random(1)).faults


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        (("no. Use it.\nType:\n  lmtrain pretrain data.text=c", "c"), "lost a"),
        (("no. Use it.\nType:\n  lmtrain pretrain data.text=a,b", "c"), "a circle"),
        (("no. Use it.\nType:\n  lmtrain pretrain data.text=null", "null"), "switches off data.text"),
        (("2 settings are wrong:\n  1. a=1 is bad. Use 2.\n  2. a=1 is worse. Use 3.", "c"), "two entries for a=1"),
        (("no. Value error, 3.", "c"), "says 'Value error,'"),
        (("no.\nLeft out: a, b.\nType:\n  lmtrain pretrain data.text=c", "c"), ""),
    ],
)
def test_the_typist_notices(answers: tuple[str, ...], fault: str) -> None:
    found = _trial(*answers, kept=("a", "b"))
    assert (fault in found) if fault else not found
