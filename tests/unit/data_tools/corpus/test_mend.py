"""Repairing text: damage of each kind is undone and counted, undamaged text is unchanged."""

from __future__ import annotations

import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.corpus.clean import repair_text, undo_garbling

HONEST = [
    "Ein Müller, ein café, 5 £ and 20 °C: naïve façade.",
    "«Où est la bibliothèque?» \u2013 “Là-bas…”",
    'ELA DISSE: "IRMÃ" E “MANHÃ” — NÃO',
    "CAFÉ™ and ÉCLAIR®",
    "Привет, мир! Ελληνικά. 日本語。 العربية",
    "Ã and Â alone, and Ð in Icelandic: Ðað",
    "price: â\u201a no",
    "half of a pair: í\xa0\x80",
]


@pytest.mark.parametrize("text", HONEST)
def test_undamaged_text_is_unchanged(text: str) -> None:
    assert undo_garbling(text) == text


def garble(text: str, times: int = 1) -> str:
    """UTF-8 read as Windows-1252, where bytes without a character stay as they are."""
    for _ in range(times):
        text = "".join(
            bytes([b]).decode("cp1252") if b not in (0x81, 0x8D, 0x8F, 0x90, 0x9D) else chr(b) for b in text.encode()
        )
    return text


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(
    "text",
    ["It\u2019s “quoted” \u2013 really…", "naïve café, señor", "Привет мир", "日本語のテキスト", "x\U0001f600y"],
)
def test_wrong_decoding_is_undone_however_often_it_happened(text: str, times: int) -> None:
    assert undo_garbling(garble(text, times)) == text


@pytest.mark.parametrize(
    ("damaged", "mended", "what"),
    [
        ("a\r\nb\rc\u2028d\x85e", "a\nb\nc\nd\ne", "line ends"),
        ("a\x00b\x1bc\x9dd\ufffe\ttab", "abcd\ttab", "control characters"),
        ("zero\u200bwidth\ufeff so\u00adft \u202eright", "zerowidth soft right", "invisible characters"),
        ("in\u200cvisible", "invisible", "joiners between Latin letters"),
        ("1\u00a0000\u202f000", "1 000 000", "odd spaces"),
        ("a  \nb\t\n", "a\nb\n", "spaces at line ends"),
        ("a\n\n\n\n\n\nb", "a\n\n\nb", "runs of blank lines"),
        ("cafe\u0301", "café", "not composed (NFC)"),
        ("cafÃ©", "café", "wrong decoding"),
    ],
)
def test_each_damage_is_mended_and_counted_by_its_name(damaged: str, mended: str, what: str) -> None:
    counts: Counter[str] = Counter()
    assert repair_text(damaged, counts) == mended
    assert counts == {f"mended: {what}": 1}
    assert repair_text(mended, counts) == mended
    assert counts.total() == 1


def test_joiners_stay_in_scripts_that_need_them() -> None:
    persian, family = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    assert repair_text(persian + family, Counter()) == persian + family


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_mending_twice_changes_nothing_more_and_gives_clean_text(text: str) -> None:
    counts: Counter[str] = Counter()
    once = repair_text(text, counts)
    assert unicodedata.is_normalized("NFC", once)
    assert "\r" not in once
    assert "\x00" not in once
    assert bool(counts) == (once != text)


def test_a_long_run_of_spaces_takes_no_time() -> None:
    text = "x" + " " * 300_000 + "y"
    assert repair_text(text, Counter()) == text
