"""Mends text that was damaged on its way: wrong decoding, control characters, line ends, invisible characters.

Each mend is named and counted. A text without such damage comes back as it was, up to Unicode's composed form (NFC).
Called by clean.py; it knows nothing of documents.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

# What Windows-1252 (and Latin-1 where it has no character) makes of the bytes 0x80 to 0xff.
_SHOWN = [bytes([byte]).decode("cp1252", "replace") for byte in range(0x80, 0x100)]
_SHOWN = [chr(0x80 + i) if shown == "\ufffd" else shown for i, shown in enumerate(_SHOWN)]
_BYTE_OF = {ord(shown): chr(0x80 + i) for i, shown in enumerate(_SHOWN)}


def _class(first: int, last: int) -> str:
    return "[" + re.escape("".join(_SHOWN[first - 0x80 : last - 0x80 + 1])) + "]"


_REST = _class(0x80, 0xBF)
_LONG = rf"{_class(0xE0, 0xEF)}{_REST}{{2}}|{_class(0xF0, 0xF4)}{_REST}{{3}}"
_SHORT = rf"{_class(0xC2, 0xDF)}{_REST}"
# One lone pair may be honest text (a name in capitals before a quote mark), so it counts only with the two leads that
# stand before nearly all of Western Europe's letters; two pairs in a row, or a longer sequence, are not an accident.
_GARBLED = re.compile(rf"(?:{_LONG}|{_SHORT}){{2,}}|{_LONG}|[ÂÃ]{_REST}")
_QUOTES = frozenset("\u2018\u2019\u201c\u201d\u2013\u2014\u2026\xa0")

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufff9-\ufffb\ufdd0-\ufdef\ufffe\uffff]")
_LINE_END = re.compile("\r\n?|[\x85\u2028\u2029]")
_INVISIBLE = re.compile("[\u200b\u2060\ufeff\u00ad\u202a-\u202e\u2066-\u2069\u200e\u200f]")
# because: the joiners shape words in Arabic and Indic scripts and glue emoji; between Latin letters they are dirt
_JOINER = re.compile("(?<=[\\x00-\u024f])[\u200c\u200d](?=[\\x00-\u024f])")
_ODD_SPACE = re.compile("[\u00a0\u2000-\u200a\u202f\u205f]")
_TRAILING = re.compile(r"(?<![ \t])[ \t]+(?=\n|$)")
_BLANK_LINES = re.compile(r"\n{4,}")

_RULES = (
    ("line ends", _LINE_END, "\n"),
    ("control characters", _CONTROL, ""),
    ("invisible characters", _INVISIBLE, ""),
    ("joiners between Latin letters", _JOINER, ""),
    ("odd spaces", _ODD_SPACE, " "),
    ("spaces at line ends", _TRAILING, ""),
    ("runs of blank lines", _BLANK_LINES, "\n\n\n"),
)


def mend(text: str, counts: Counter[str]) -> str:
    """The text mended; `counts` gets one for each kind of damage it had."""
    undone = undo_garbling(text)
    if undone != text:
        counts["mended: wrong decoding"] += 1
    text = undone
    for name, pattern, replacement in _RULES:
        text, found = pattern.subn(replacement, text)
        if found:
            counts[f"mended: {name}"] += 1
    if not unicodedata.is_normalized("NFC", text):
        counts["mended: not composed (NFC)"] += 1
        text = unicodedata.normalize("NFC", text)
    return text


def undo_garbling(text: str) -> str:
    """UTF-8 that was read as Windows-1252, once or several times, becomes what it was: "cafÃ©" is "café"."""
    for _ in range(3):
        better = _GARBLED.sub(_decoded, text)
        if better == text:
            break
        text = better
    return text


def _decoded(match: re.Match[str]) -> str:
    garbled = match[0]
    before = match.string[match.start() - 1 : match.start()]
    if len(garbled) == 2 and garbled[0] == "Ã" and garbled[1] in _QUOTES and before.isupper():
        return garbled  # "IRMÃ" and the quote mark behind it
    try:
        return garbled.translate(_BYTE_OF).encode("latin-1").decode("utf-8")
    except UnicodeError:  # surrogates, overlong forms: no UTF-8 after all
        return garbled
