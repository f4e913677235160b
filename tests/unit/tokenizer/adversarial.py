"""Adversarial documents: every kind of character next to every other, and runs around the sizes of blocks."""

# ruff: noqa: RUF001 - characters that look like others are what this is about

from __future__ import annotations

import random
from collections.abc import Iterator

SPACES = (
    "\t\n\x0b\x0c\r \x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u2028\u2029\u202f\u205f\u3000\u200b\u180e\ufeff"
)
PIECES = [
    *SPACES, " ", " ", "  ", "\n\n", "\r\n", "\n    ", "   \n", " \u00a0 ", "\u3000\u3000",
    *"abcXYZ", "the", "The", "straße", "ÉCOLE", "naïve", "İstanbul", "ſ", "ŉ", "\u212a", "ǅ", "ﬁ", "ﬆ", "Σας",
    "Привет",
    "你好", "豈", "ば", "ばﾞ", "한국어", "각", "ไทย", "हिन्दी", "עברית", "العربية", "ა", "Ა", "𝔘", "𐐀", "ꭰ", "ª", "ʰ",
    *"0159", "12", "123", "1234", "12345678901234567890", "٣٤٥", "１２３４", "²³¹", "½", "Ⅷ", "〇", "𝟘𝟙𝟚𝟛", "१२३४",
    *"'\".,!?-_#@()[]{}<>|/\\*+=~^`$%&;:", "''", "'''", "...", "--", "»", "«", "“", "”", "’", "…", "—", "。",
    "、", "€", "©",
    "'s", "'S", "'ſ", "'t", "'re", "'RE", "'vE", "'m", "'ll", "'lL", "'d", "'dog", "'save", "'llama", "don't",
    "we'll've",
    "'l", "'r", "'v", "'e", "’s",
    "\u0301", "\u0327", "\u0345", "e\u0301\u0327", "a\u0300\u0315\u0323", "\u302e\u302f", "\u1b44\u302e",
    "\u0f71\u0f72",
    "\U0001d15e", "\U0001d165\U0001d16d", "\u08e0\u08d4", "\U0001e000\u302f\u1b44", "\u1baa\u0345\u302e\u0bcd",
    "😀", "👩‍👩‍👧", "🇩🇪", "\u200d", "\ufe0f", "\ufffd", "\x00", "\x01", "\x7f", "\x9f", "\xad", "\ue000", "\ud7ff",
    "\uffff", "\U0010ffff", "\U000e0041", "\U0001f1e6", "\u2060", "\u0600", "\u070f",
    "<|endoftext|>", "<|begin_of_text|>", "[MASK]", "[UNK]", "[SEP]", "##s", "Ġthe", "Ċ", "</s>",
    "http://a.b/c?d=e&f", "a.b", "(word", "((word", "\t(word", "“word", ".5", "x²", "_init__", "camelCase",
    "SNAKE_CASE",
    "supercalifragilisticexpialidocious", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]  # fmt: skip


def document(rng: random.Random) -> str:
    """One document; which one hangs on the state of rng alone."""
    style = rng.randrange(6)
    if style == 0:  # neighbours of every kind
        return "".join(rng.choices(PIECES, k=rng.randrange(1, 40)))
    if style == 1:  # few kinds, so that they meet themselves
        few = rng.choices(PIECES, k=rng.randrange(2, 5))
        return "".join(rng.choices(few, k=rng.randrange(1, 60)))
    if style == 2:  # something just before, at or behind the end of a block of 64 bytes
        ahead = rng.choice(["a", " ", "1", ".", "\n", "é", "x "]) * rng.randrange(55, 70)
        return ahead + "".join(rng.choices(PIECES, k=rng.randrange(1, 8)))
    if style == 3:  # long runs
        return "".join(rng.choice(PIECES) * rng.choice((1, 2, 3, 5, 15, 16, 17, 31, 64, 130)) for _ in range(3))
    if style == 4:  # any character at all
        return "".join(_any_character(rng) for _ in range(rng.randrange(1, 50)))
    words = rng.choices(["the", "cat's", "Don't", "naïve", "12", "3000", "\n", "—", "Hello,", "WORLD!", "  "], k=60)
    return " ".join(words)


def _any_character(rng: random.Random) -> str:
    code = rng.randrange(rng.choice((0x80, 0x800, 0x3000, 0x10000, 0x20000, 0x110000)))
    return chr(code) if not 0xD800 <= code < 0xE000 else " "


def documents(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        yield document(rng)
