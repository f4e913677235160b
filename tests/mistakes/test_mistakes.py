"""Two hundred mistakes, each answered in words that name what is wrong and what to do, and a typist who does it.

All of them go through the command line in one process without torch. A few of every family run in `make test`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.mistakes.families import drawn
from tests.mistakes.mistake import CODES, RAW, Mistake, first_sentence, problem_of, type_the_way_out
from tests.mistakes.runner import Runner
from tests.mistakes.written import written

SEED = 12
NUM_COMPOSING, NUM_OTHERS = 3, 16  # in `make test`; the others take next to no time


@cache
def every() -> list[Mistake]:
    return [*written(), *drawn(SEED)]


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
def runner() -> Iterator[Runner]:
    with Runner() as made:
        yield made


@pytest.mark.parametrize("mistake", marked())
def test_a_mistake_is_met(mistake: Mistake, runner: Runner, tmp_path: Path) -> None:
    words = mistake.at(tmp_path)
    said = runner(words, mistake.env)
    text = said.text
    assert said.code == mistake.code, text
    assert said.code in CODES
    assert not said.torch
    assert text.startswith("error: "), text
    assert not [raw for raw in RAW if raw in text], text
    for asked in mistake.says:
        assert asked.replace("{here}", str(tmp_path)) in text, (asked, text)
    assert text.strip().endswith((".", "?", ".`")), text
    assert len(problem_of(text)) > len(first_sentence(text)) + 3, f"no way out: {text}"

    after = list(words)
    if mistake.mended is not None:
        mistake.write(tmp_path, mistake.mended)
    elif mistake.instead is not None:
        after = [word.replace("{here}", str(tmp_path)) for word in mistake.instead]
    else:
        typed = type_the_way_out(mistake, text, words)
        assert typed is not None, f"nothing to type: {text}"
        after = typed
    further = runner(after, mistake.env)
    assert first_sentence(text) not in further.text, (after, further.text)
    assert not [raw for raw in RAW if raw in further.text], further.text
    if mistake.code_after is not None:
        assert further.code == mistake.code_after, (after, further.text)


def test_there_are_two_hundred() -> None:
    names = [mistake.name for mistake in every()]
    assert len(names) == len(set(names))
    assert len(names) >= 200


def test_a_typist_takes_the_words_of_a_message() -> None:
    mistake = Mistake("", (), (), wrong="optim.lrr=1")
    said = "error: optim.lrr=1 is no setting. Did you mean optim.lr=1?"
    typed = type_the_way_out(mistake, said, ["a", "optim.lrr=1"])
    assert typed == ["a", "optim.lr=1"]
    mistake = Mistake("", (), (), wrong="run.dir=a,b")
    assert type_the_way_out(mistake, "error: run.dir=a,b has a comma. Type \"run.dir='a,b'\".", ["run.dir=a,b"]) == [
        "run.dir='a,b'"
    ]
    mistake = Mistake("", (), (), wrong="parallel.tp=3")
    assert type_the_way_out(mistake, "error: parallel.tp=3 does not divide 4. Use 1, 2 or 4.", ["parallel.tp=3"]) == [
        "parallel.tp=1"
    ]
    assert type_the_way_out(mistake, "error: parallel.tp=3 is wrong. Sorry.", ["parallel.tp=3"]) is None
