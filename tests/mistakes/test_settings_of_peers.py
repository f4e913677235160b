"""Every setting of other tools is answered with its meaning here, or with the sentence that there is nothing like it;
one without dashes is answered as one with dashes.

`peers/settings/` has the names of each tool's settings, taken from its sources, with a value as people type it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lmtrain.cli.subcommands import verbs_with
from lmtrain.start.other_tools.explain_foreign_line import is_own_key
from lmtrain.start.other_tools.translate_foreign_flags import translate_options
from tests.mistakes.runner import Runner
from tests.mistakes.typist import shown_line

SEED, NUM_LINES, NUM_WIDE = 3, 8, 160
SHARES = 6  # of all names, so that they run at once
LIKE_A_FILE = ("config", "config_file", "config-file", "yaml-cfg", "config_name")  # these name a file of settings


@cache
def peers() -> list[tuple[str, str, str]]:
    """Each (tool, name, value); the value of a switch is "", and a list has blanks."""
    return [
        (file.stem, *line.partition(" ")[::2])
        for file in sorted((Path(__file__).with_name("peers") / "settings").glob("*.txt"))
        for line in file.read_text().splitlines()
    ]


@pytest.mark.wide
@pytest.mark.parametrize("share", range(SHARES))
def test_every_setting_of_a_peer_is_known(share: int) -> None:
    unknown = [
        f"{tool} {name}" for tool, name, value in peers()[share::SHARES]
        if translate_options([(f"--{name}", *value.split())], has_option=verbs_with).unknown
    ]  # fmt: skip
    assert not unknown


def lines() -> Iterator[object]:
    """Some settings of one tool at once, with and without dashes."""
    rng = random.Random(SEED)
    tools = sorted({tool for tool, _, _ in peers()})
    for number in range(NUM_WIDE):
        tool = rng.choice(tools)
        names = [(name, value) for peer, name, value in peers() if peer == tool and _differs(name)]
        chosen = rng.sample(names, rng.choice((1, 1, 2, 4)))
        yield pytest.param(chosen, id=f"{tool}-{number}", marks=() if number < NUM_LINES else pytest.mark.wide)


def _differs(name: str) -> bool:
    return not is_own_key(name.replace("-", "_")) and name.rpartition(".")[2] not in LIKE_A_FILE


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("nothing") / "here") as made:
        yield made


@pytest.mark.parametrize("chosen", [*lines()])
def test_dashes_make_no_difference(chosen: list[tuple[str, str]], runner: Runner) -> None:
    with_dashes = [word for name, value in chosen for word in (f"--{name}", *value.split())]
    without = [f"{name.replace('-', '_')}={','.join(value.split()) or 'true'}" for name, value in chosen]
    answers = [runner(["pretrain", "data.path=x", *words]) for words in (with_dashes, without)]
    for answer in answers:
        assert "` lists its options" not in answer.text, answer.text
        assert " is not a setting. Known:" not in answer.text, answer.text
        assert not answer.is_accepted
    typed = [sorted(shown_line(answer.text) or []) for answer in answers]
    assert typed[0] == typed[1], "\n".join(answer.text for answer in answers)
