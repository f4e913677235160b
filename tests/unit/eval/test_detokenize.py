"""Each of the 24 steps by itself, their order, and the whole on a passage."""

from __future__ import annotations

import pytest

from lmtrain.eval.tasks.wikitext import STEPS, detokenize

CASES = [
    ("boys 'toys", "boys'toys"),
    ("a/' 7/b", "a/'[0-9]/b"),  # the historical replacement by the pattern itself
    ("well @-@ known", "well-known"),
    ("1 @,@ 200", "1,200"),
    ("3 @.@ 5", "3.5"),
    ("this : that", "this: that"),
    ("this ; that", "this; that"),
    ("end . Next", "end. Next"),
    ("oh ! Yes", "oh! Yes"),
    ("who ? Me", "who? Me"),
    ("one , two", "one, two"),
    ("( a b )", "(a b)"),
    ("[ a b ]", "[a b]"),
    ("{ a b }", "{a b}"),
    ('say " a b " now', 'say "a b" now'),
    ("say ' a b ' now", "say 'a b' now"),
    ("= = = = Deep", "==== Deep"),
    ("= = = Mid", "=== Mid"),
    ("= = High", "== High"),
    ("20 \u00b0 C", "20\u00b0C"),
    ("line \nnext", "line\nnext"),
    ("line\n next", "line\nnext"),
    ("about N of", "about 1 of"),
    ("mill 's wheel", "mill's wheel"),
]


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)))
def test_each_step_does_its_own_replacement(number: int, case: tuple[str, str]) -> None:
    before, after = case
    assert STEPS[number](before) == after
    assert before != after


def test_there_are_as_many_steps_as_cases() -> None:
    assert len(STEPS) == len(CASES) == 24


def test_order_matters_longer_headings_first() -> None:
    """Headings shortened before longer ones were looked for would come out as two halves."""
    assert detokenize(" = = = Deep = = = \n") == " === Deep ===\n"


def test_a_passage() -> None:
    text = ' = The Mill = \n \n The mill \'s wheel ( built 1900 ) was " old " , 1 @,@ 200 years . \n It stood . '
    assert detokenize(text) == ' = The Mill =\n\nThe mill\'s wheel (built 1900) was "old", 1,200 years.\nIt stood. '


def test_quotes_are_paired_from_the_left_even_across_a_genitive() -> None:
    assert detokenize("the ' 80s and ' 90s") == "the '80s and' 90s"
    assert detokenize("it 's a dog 's day") == "it's a dog's day"
