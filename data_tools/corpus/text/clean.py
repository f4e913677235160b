"""The step `clean`: mends text, takes boilerplate lines out, and leaves out documents that break a rule.

Called by `lmtrain corpus clean`. What each rule cost is counted under its name.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from data_tools.corpus.flow.reading import Documents
from data_tools.corpus.flow.steps import Selection, Tally
from data_tools.corpus.text.quality import GROUPS, LINE_RULES, RULES, Facts
from data_tools.scripts import check_script, script_shares
from lmtrain.errors import UsageError, nearest
from lmtrain.tokenizer.json_lines import Document

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

_DAMAGE = (  # what is counted, the pattern, and what stands in its place
    ("line ends", re.compile("\r\n?|[\x85\u2028\u2029]"), "\n"),
    (
        "control characters",
        re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufff9-\ufffb\ufdd0-\ufdef\ufffe\uffff]"),
        "",
    ),
    ("invisible characters", re.compile("[\u200b\u2060\ufeff\u00ad\u202a-\u202e\u2066-\u2069\u200e\u200f]"), ""),
    # because: the joiners shape words in Arabic and Indic scripts and glue emoji; between Latin letters they are dirt
    ("joiners between Latin letters", re.compile("(?<=[\\x00-\u024f])[\u200c\u200d](?=[\\x00-\u024f])"), ""),
    ("odd spaces", re.compile("[\u00a0\u2000-\u200a\u202f\u205f]"), " "),
    ("spaces at line ends", re.compile(r"(?<![ \t])[ \t]+(?=\n|$)"), ""),
    ("runs of blank lines", re.compile(r"\n{4,}"), "\n\n\n"),
)
DEFAULT_RULES = ("gopher", "lines_ending_in_punctuation")
_BLANK_LINES = re.compile(r"\n{3,}")


def mend(text: str, counts: Counter[str]) -> str:
    """The text mended; `counts` gets one for each kind of damage it had."""
    undone = undo_garbling(text)
    if undone != text:
        counts["mended: wrong decoding"] += 1
    text = undone
    for name, pattern, replacement in _DAMAGE:
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


@dataclass(frozen=True)
class Clean(Selection):
    """Rules by name with their limits; scripts that are welcome, with the least share of letters they must have."""

    rules: tuple[tuple[str, float], ...] = ()
    line_rules: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    min_script_share: float = 0.5
    name: ClassVar[str] = "clean"

    def kept(self, documents: Documents, key: str, tally: Tally) -> Iterator[Document]:
        for _, document in documents:
            text = mend(document[key], tally.changed)
            text = self._without_lines(text, tally)
            cause = self.cause(text)
            if cause is None:
                yield document | {key: text}
            else:
                tally.drop(cause)

    def cause(self, text: str) -> str | None:
        """The first rule that the text breaks, or None for one that stays."""
        if not text.strip():
            return "empty"
        facts = Facts(text)
        broken = next((name for name, limit in self.rules if RULES[name].breaks(facts, limit)), None)
        if broken is None and self.scripts:
            shares = script_shares(text)
            if sum(shares.get(script, 0.0) for script in self.scripts) < self.min_script_share:
                return f"script: {next(iter(shares), 'none')}"
        return broken

    def _without_lines(self, text: str, tally: Tally) -> str:
        if not self.line_rules:
            return text
        kept = []
        for line in text.split("\n"):
            broken = next((name for name in self.line_rules if line.strip() and LINE_RULES[name](line)), None)
            if broken is None:
                kept.append(line)
            else:
                tally.changed[f"lines taken out: {broken}"] += 1
        return _BLANK_LINES.sub("\n\n", "\n".join(kept)).strip("\n") if len(kept) < text.count("\n") + 1 else text


def build_clean(words: Iterable[str], scripts: Sequence[str] = (), min_script_share: float = 0.5) -> Clean:
    """From words as one types them: groups (gopher), rules (min_words), limits (min_words=20), line rules."""
    rules: dict[str, float] = {}
    line_rules: list[str] = []
    for word in words:
        name, _, limit = word.partition("=")
        if name == "none":
            continue
        if name == "c4_lines":
            line_rules += [rule for rule in LINE_RULES if rule not in line_rules]
        elif name in LINE_RULES:
            line_rules += [name] if name not in line_rules else []
        elif name in GROUPS and not limit:
            rules |= {rule: RULES[rule].limit for rule in GROUPS[name] if rule not in rules}
        elif name in RULES:
            rules[name] = _limit(word, limit) if limit else RULES[name].limit
        else:
            known = [*RULES, *GROUPS, *LINE_RULES, "c4_lines", "none"]
            raise UsageError(f"--rule={word} is no rule. {nearest(name, known)}")
    if not 0 <= min_script_share <= 1:
        raise UsageError(f"--min-script-share={min_script_share} is not a share. Give a number from 0 to 1.")
    welcome = tuple(name.lower() for name in scripts)
    for name in welcome:
        check_script(name)
    return Clean(tuple(rules.items()), tuple(line_rules), welcome, min_script_share)


def _limit(word: str, limit: str) -> float:
    try:
        return float(limit)
    except ValueError as error:
        raise UsageError(f"--rule={word} has no number behind the sign. Write it as min_words=20.") from error
