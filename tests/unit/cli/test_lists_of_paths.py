"""Several paths in one word are given apart, as words of a verb or as the values of an option."""

from __future__ import annotations

import pytest

from lmtrain.cli.settings_keys.parse_typed_line import parse_line
from lmtrain.errors import Way
from lmtrain.start.other_tools.typed_line import fits


@pytest.mark.parametrize(
    ("typed", "corrected"),
    [
        ("corpus dedupe a,b --output o", "corpus dedupe a b --output o"),
        ("tokenizer show t --data a,b --key k", "tokenizer show t --data a --data b --key k"),
        ("tokenizer show t --data=a,b", "tokenizer show t --data=a --data=b"),
    ],
)
def test_a_list_is_taken_apart(typed: str, corrected: str) -> None:
    command, way = parse_line(typed.split()), Way(("a", "b"), ("a,b",))
    assert fits(command, way)
    assert " ".join(command.apply(way).words) == corrected


def test_a_setting_is_no_list_of_words() -> None:
    assert not fits(parse_line(["pretrain", "data.path=a,b"]), Way(("a", "b"), ("a,b",)))
