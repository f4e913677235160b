"""Every letter has one script, by its block or, outside the blocks, by its name."""

from __future__ import annotations

from itertools import pairwise

import pytest

from data_tools.writing_systems import SCRIPTS, check_script, script_shares
from lmtrain.errors import UsageError


@pytest.mark.parametrize(
    ("text", "script", "share"),
    [
        ("plain words, 123!", "latin", 1.0),
        ("", "latin", 0.0),
        ("123 !?", "latin", 0.0),
        ("naïve Größe", "latin", 1.0),
        ("ab вг", "latin", 0.5),
        ("ab вг", "cyrillic", 0.5),
        ("Ελλάδα", "greek", 1.0),
        ("日本語です", "han", 0.6),
        ("日本語です", "kana", 0.4),
        ("한국어 ok", "hangul", 0.6),
        ("\U00020000a", "han", 0.5),
        ("ⴰⵣⵓⵍ", "tifinagh", 1.0),  # of no block in the table
        ("ªµｌ", "latin", 1.0),  # whose names say nothing of Latin, or FULLWIDTH first
        ("ﾜﾮ", "kana", 0.5),
        ("ﾜﾮ", "hangul", 0.5),
    ],
)
def test_the_share_of_letters(text: str, script: str, share: float) -> None:
    assert script_shares(text).get(script, 0.0) == pytest.approx(share)


def test_no_two_scripts_share_a_block() -> None:
    blocks = sorted(block for of_script in SCRIPTS.values() for block in of_script)
    assert all(first <= last for first, last in blocks)
    assert all(before[1] < after[0] for before, after in pairwise(blocks))


def test_scripts_are_told_apart() -> None:
    assert [next(iter(script_shares(letter))) for letter in "aÅДλ漢カひ한\u0627ไ"] == [
        "latin", "latin", "cyrillic", "greek", "han", "kana", "kana", "hangul", "arabic", "thai"
    ]  # fmt: skip
    assert script_shares("ДЖ abc 12!") == {"latin": 0.6, "cyrillic": 0.4}
    assert list(script_shares("ДЖ abc 12!")) == ["latin", "cyrillic"]
    assert script_shares("12 !") == {}


def test_an_unknown_script_is_refused() -> None:
    with pytest.raises(UsageError, match="Did you mean latin"):
        check_script("latvian")
