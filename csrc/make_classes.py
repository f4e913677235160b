"""Writes csrc/unicode_tables.h: what `tokenizers` takes every character for. Run when that library learns new Unicode.

    python csrc/make_classes.py            writes the file
    python csrc/make_classes.py --check    says whether it is current

Everything is asked of the library itself, character by character, because its Unicode is of another age than Python's:
in which class GPT-2's pattern sees a character, and what BERT's normalizer and pre-tokenizer do with it.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenizers import normalizers, pre_tokenizers

PATH = Path(__file__).with_name("unicode_tables.h")
CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
OTHER, LETTER, NUMBER, SPACE = range(4)
DROPPED, BLANK, CJK, PUNCTUATION, MARK, COMBINING = (1 << bit for bit in range(6))
HANGUL = range(0xAC00, 0xD7A4)
HEAD = """\
// Made by csrc/make_classes.py from the `tokenizers` library; not to be edited.
#pragma once

#include <cstdint>

namespace unicode {

struct Run {  // from this code point to the next run's
  uint32_t first;
  uint8_t value;
};

struct Shift {  // lower case is code + delta, for every `step`th code point from first to last
  uint32_t first, last, step;
  int32_t delta;
};
"""


def split_class(character: str) -> int:
    """What GPT-2's pattern takes a character for."""
    if len(_byte_level("a" + character)) == 1:
        return LETTER
    if len(_byte_level("1" + character)) == 1:
        return NUMBER
    return OTHER if len(_byte_level("!" + character)) == 1 else SPACE


def bert_flags(character: str) -> int:
    flags = 0
    cleaned = _clean(character)
    flags |= DROPPED if not cleaned else 0
    flags |= CJK if len(_cjk(character)) == 3 else 0
    words = [word for word, _ in _bert(f"a{character}b")]
    flags |= BLANK if words == ["a", "b"] else 0
    flags |= PUNCTUATION if len(words) == 3 else 0
    if cleaned == " ":
        assert flags & BLANK, hex(ord(character))  # so that cleaning it changes nothing
    flags |= MARK if not _strip(character) else 0
    # A character with a combining class moves before U+0345, whose class is the highest, or is U+0345 itself.
    flags |= COMBINING if _nfd("\u0345" + character)[0] == character else 0
    return flags


def _normalizer(**wanted: bool) -> Callable[[str], str]:
    parts = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}
    return normalizers.BertNormalizer(**(parts | wanted)).normalize_str


_byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True).pre_tokenize_str
_bert = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
_nfd = normalizers.NFD().normalize_str
_clean, _cjk = _normalizer(clean_text=True), _normalizer(handle_chinese_chars=True)
_strip, _lower = _normalizer(strip_accents=True), _normalizer(lowercase=True)


def runs(value_of: Callable[[str], int]) -> Iterator[str]:
    last = -1
    for character in CHARACTERS:
        if (value := value_of(character)) != last:
            yield f"{{{ord(character):#x}, {value}}}"
            last = value


def stripped() -> Iterator[str]:
    """Characters that become others without accents: code point, how many, which. Hangul follows a formula."""
    for character in CHARACTERS:
        kept = _strip(character)
        if kept and kept != character and ord(character) not in HANGUL:
            yield ", ".join(f"{number:#x}" for number in (ord(character), len(kept), *map(ord, kept)))


def shifts() -> Iterator[str]:
    """Lower case as arithmetic series; U+0130 alone becomes two characters, which csrc/wordpiece.cpp knows."""
    series: list[list[int]] = []
    for character in CHARACTERS:
        lower = _lower(character)
        if lower == character or character == "\u0130":
            continue
        assert len(lower) == 1, hex(ord(character))
        code, delta = ord(character), ord(lower) - ord(character)
        found = next((s for s in series[-2:] if s[3] == delta and code - s[1] in (s[2] or 1, s[2] or 2)), None)
        if found:
            found[1], found[2] = code, code - found[1]
        else:
            series.append([code, code, 0, delta])
    for first, last, step, delta in series:
        yield f"{{{first:#x}, {last:#x}, {step or 1}, {delta}}}"


def combining_classes() -> Iterator[str]:
    """The classes of combining characters that survive the removal of accents: their order among themselves."""
    kept = [c for c in CHARACTERS if bert_flags(c) & (COMBINING | MARK) == COMBINING]
    classes = {c: unicodedata.combining(c) for c in kept}
    for one in kept:
        for other in kept:  # the library's classes are Python's, here
            assert (_nfd(one + other) == other + one != one + other) == (classes[one] > classes[other])
    yield from (f"{{{ord(c):#x}, {classes[c]}}}" for c in kept)


def array(declaration: str, comment: str, items: Iterable[str]) -> str:
    lines, line = [], " "
    for item in items:
        if len(line) + len(item) > 117:
            lines.append(line)
            line = " "
        line += f" {item},"
    return "\n".join([f"\n// {comment}", f"constexpr {declaration}[] = {{", *lines, line, "};\n"])


def text() -> str:
    return "".join(
        [
            HEAD,
            array("Run kSplitClasses", "GPT-2: 0 other, 1 letter, 2 number, 3 white space", runs(split_class)),
            array(
                "Run kBertFlags",
                "BERT: 1 dropped, 2 blank, 4 CJK, 8 punctuation, 16 accent, 32 with a combining class",
                runs(bert_flags),
            ),
            array("uint32_t kStripped", "without accents: code point, how many follow, which", stripped()),
            array("Shift kShifts", "lower case", shifts()),
            array("Run kCombining", "combining classes of what is no accent; single code points", combining_classes()),
            "\n}  // namespace unicode\n",
        ]
    )


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PATH.read_text() != text() and "csrc/unicode_tables.h is out of date: run csrc/make_classes.py")
    PATH.write_text(text())
