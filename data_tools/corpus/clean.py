"""The step `clean`: repairs text, removes boilerplate lines, and drops documents that break a rule.

Called by `lmtrain corpus clean`. The report counts dropped documents per rule. The rules separate prose from
boilerplate, lists, menus and machine output; the rules and their limits follow the descriptions published with Gopher
(Rae and others, 2021), C4 (Raffel and others, 2020) and FineWeb (Penedo and others, 2024). Each rule has a name and one
configurable limit; a document that breaks a rule is dropped. Line rules remove lines from a document instead.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from data_tools.corpus.flow.run_one_corpus_step_in_workers import Documents, SelectionStep, Tally
from data_tools.corpus.flow.word_ngram_hashes import Hashes, hash_runs, mix
from data_tools.writing_systems import check_script, script_shares
from lmtrain.errors import UsageError, example, spelling_hint, way
from lmtrain.tokenizer.text_from_json_lines import Document

_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("•", "‣", "▪", "●", "◦", "-", "*", "·")
# sentence ends in Western, East Asian, Arabic and Indic scripts, and closing quotes and brackets
_SENTENCE_ENDS = tuple(".!?\"')\u201d\u2019\u2026\u3002\uff01\uff1f\u061f\u0964\u00bb")
_AROUND_WORDS = ".,;:!?\"'()[]\u201c\u201d\u2018\u2019"
_POLICY = re.compile(
    r"terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies", re.IGNORECASE
)
_TOP_RUNS = ((2, 0.20), (3, 0.18), (4, 0.16))
_REPEATED_RUNS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
# The bytes 0x80 to 0xff decoded as Windows-1252, or as Latin-1 where Windows-1252 has no character.
_DECODED_BYTES = [bytes([byte]).decode("cp1252", "replace") for byte in range(0x80, 0x100)]
_DECODED_BYTES = [chr(0x80 + i) if shown == "\ufffd" else shown for i, shown in enumerate(_DECODED_BYTES)]
_BYTE_OF = {ord(shown): chr(0x80 + i) for i, shown in enumerate(_DECODED_BYTES)}
_QUOTES = frozenset("\u2018\u2019\u201c\u201d\u2013\u2014\u2026\xa0")
_DAMAGE = (  # (name in the report, pattern, replacement)
    ("line ends", re.compile("\r\n?|[\x85\u2028\u2029]"), "\n"),
    (
        "control characters",
        re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufff9-\ufffb\ufdd0-\ufdef\ufffe\uffff]"),
        "",
    ),
    ("invisible characters", re.compile("[\u200b\u2060\ufeff\u00ad\u202a-\u202e\u2066-\u2069\u200e\u200f]"), ""),
    # because: joiners shape words in Arabic and Indic scripts and join emoji; between Latin letters they are noise
    ("joiners between Latin letters", re.compile("(?<=[\\x00-\u024f])[\u200c\u200d](?=[\\x00-\u024f])"), ""),
    ("odd spaces", re.compile("[\u00a0\u2000-\u200a\u202f\u205f]"), " "),
    ("spaces at line ends", re.compile(r"(?<![ \t])[ \t]+(?=\n|$)"), ""),
    ("runs of blank lines", re.compile(r"\n{4,}"), "\n\n\n"),
)
DEFAULT_RULES = ("gopher", "lines_ending_in_punctuation")
_BLANK_LINES = re.compile(r"\n{3,}")


class TextProperties:
    """Properties of a text that the rules measure (words, lines, ...), computed when they are first needed."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def word_ids(self) -> Hashes:
        """A hash per word, equal for equal words within this text."""
        numbers: dict[str, int] = {}
        return mix(np.array([numbers.setdefault(word, len(numbers) + 1) for word in self.words], np.uint64))

    @cached_property
    def word_chars(self) -> npt.NDArray[np.int64]:
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [part for part in map(str.strip, re.split(r"\n\s*\n", self.text)) if part]

    def share_of_lines(self, test: Callable[[str], bool]) -> float:
        """Return the share of lines for which `test` is True."""
        return sum(map(test, self.lines)) / max(len(self.lines), 1)

    @cached_property
    def num_word_chars(self) -> int:
        return max(int(self.word_chars.sum()), 1)


def _repeated_shares(segments: list[str]) -> tuple[float, float]:
    """Return (share of the number, share of the characters) of the segments, a text's lines or paragraphs, that are
    equal to an earlier segment. Both are 0 if there are none.
    """
    earlier: set[str] = set()
    number = chars = 0
    for part in segments:
        if part in earlier:
            number += 1
            chars += len(part)
        earlier.add(part)
    return number / max(len(segments), 1), chars / max(sum(map(len, segments)), 1)


def _top_run_share(run_words: int, properties: TextProperties) -> float:
    """Return the share of a text's characters that is in all occurrences of its most frequent sequence of `run_words`
    words. Return 0.0 if no sequence repeats.
    """
    runs = hash_runs(properties.word_ids, run_words)
    if not runs.size:
        return 0.0
    _, first, counts = np.unique(runs, return_index=True, return_counts=True)
    best = np.lexsort((first, -counts))[0]
    chars = int(properties.word_chars[first[best] : first[best] + run_words].sum())
    return float(counts[best] * chars / properties.num_word_chars) if counts[best] > 1 else 0.0


def _repeated_runs_share(run_words: int, properties: TextProperties) -> float:
    """Return the share of a text's characters that is in sequences of `run_words` words which also occurred earlier in
    the text. A word in several such sequences is counted once.
    """
    runs = hash_runs(properties.word_ids, run_words)
    if not runs.size:
        return 0.0
    is_repeat = np.ones(runs.size, bool)
    is_repeat[np.unique(runs, return_index=True)[1]] = False
    starts = np.zeros(len(properties.words) + 1, np.int64)
    starts[np.flatnonzero(is_repeat)] += 1
    starts[np.flatnonzero(is_repeat) + run_words] -= 1
    return float(properties.word_chars[np.cumsum(starts[:-1]) > 0].sum() / properties.num_word_chars)


def _mean_word_chars(properties: TextProperties) -> float:
    """Return the mean number of characters in a word."""
    return properties.num_word_chars / max(len(properties.words), 1)


@dataclass(frozen=True)
class Rule:
    """A rule for documents: a measure and its default limit."""

    name: str
    limit: float
    measure: Callable[[TextProperties], float]
    at_least: bool = False  # True: the limit is the least allowed value; False: the greatest

    def breaks(self, properties: TextProperties, limit: float) -> bool:
        """Return True if the text's measure is on the wrong side of `limit`."""
        value = self.measure(properties)
        return value < limit if self.at_least else value > limit


_minimum = partial(Rule, at_least=True)

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        # Gopher: quality
        _minimum("min_words", 50, lambda f: len(f.words)),
        Rule("max_words", 100_000, lambda f: len(f.words)),
        _minimum("min_mean_word_chars", 3, _mean_word_chars),
        Rule("max_mean_word_chars", 10, _mean_word_chars),
        Rule(
            "symbols_per_word", 0.1,
            lambda f: max(f.text.count("#"), f.text.count("…") + f.text.count("...")) / max(len(f.words), 1),
        ),
        Rule("bullet_lines", 0.9, lambda f: f.share_of_lines(lambda line: line.startswith(_BULLETS))),
        Rule("ellipsis_lines", 0.3, lambda f: f.share_of_lines(lambda line: line.endswith(("…", "...")))),
        _minimum(
            "words_with_letters", 0.8,
            lambda f: sum(any(map(str.isalpha, word)) for word in f.words) / max(len(f.words), 1),
        ),
        _minimum(
            "stop_words", 2,
            lambda f: len(_STOP_WORDS.intersection(word.strip(_AROUND_WORDS).lower() for word in f.words)),
        ),
        # Gopher: repetition
        Rule("repeated_lines", 0.30, lambda f: _repeated_shares(f.lines)[0]),
        Rule("repeated_line_chars", 0.20, lambda f: _repeated_shares(f.lines)[1]),
        Rule("repeated_paragraphs", 0.30, lambda f: _repeated_shares(f.paragraphs)[0]),
        Rule("repeated_paragraph_chars", 0.20, lambda f: _repeated_shares(f.paragraphs)[1]),
        *(Rule(f"top_{n}_words", limit, partial(_top_run_share, n)) for n, limit in _TOP_RUNS),
        *(Rule(f"repeated_{n}_words", limit, partial(_repeated_runs_share, n)) for n, limit in _REPEATED_RUNS),
        # C4
        Rule("lorem_ipsum", 0, lambda f: f.text.lower().count("lorem ipsum")),
        Rule("curly_brackets", 0, lambda f: f.text.count("{")),
        # FineWeb
        _minimum(
            "lines_ending_in_punctuation", 0.12, lambda f: f.share_of_lines(lambda line: line.endswith(_SENTENCE_ENDS)),
        ),
        Rule("short_lines", 0.67, lambda f: f.share_of_lines(lambda line: len(line) <= 30)),
    )
}

GROUPS: dict[str, tuple[str, ...]] = {
    "gopher": tuple(RULES)[: tuple(RULES).index("lorem_ipsum")],
    "c4": ("lorem_ipsum", "curly_brackets"),
    "fineweb": ("lines_ending_in_punctuation", "short_lines", "repeated_line_chars"),
}

LINE_RULES: dict[str, Callable[[str], bool]] = {  # C4: True for a line to remove
    "line_without_end": lambda line: not line.rstrip().endswith(_SENTENCE_ENDS),
    "line_too_short": lambda line: len(line.split()) < 3,
    "line_javascript": lambda line: "javascript" in line.lower(),
    "line_policy": lambda line: _POLICY.search(line) is not None,
}


def _character_class(first: int, last: int) -> str:
    """Return a regex class of the characters that the bytes first to last become when they are decoded wrongly."""
    return "[" + re.escape("".join(_DECODED_BYTES[first - 0x80 : last - 0x80 + 1])) + "]"


_CONTINUATION = _character_class(0x80, 0xBF)
_LONG_SEQUENCE = (
    rf"{_character_class(0xE0, 0xEF)}{_CONTINUATION}{{2}}|{_character_class(0xF0, 0xF4)}{_CONTINUATION}{{3}}"
)
_PAIR = rf"{_character_class(0xC2, 0xDF)}{_CONTINUATION}"
# A single pair can be genuine text (a name in capitals before a quote mark), so it counts only after the two lead
# characters of nearly all Western European letters; two pairs in a row or a longer sequence cannot be a coincidence.
_GARBLED = re.compile(rf"(?:{_LONG_SEQUENCE}|{_PAIR}){{2,}}|{_LONG_SEQUENCE}|[ÂÃ]{_CONTINUATION}")


def repair_text(text: str, counts: Counter[str]) -> str:
    """Return the text with damage repaired: wrong decoding, control and invisible characters, odd spaces and line ends.
    Add 1 to `counts` under the name of each kind of damage found.
    """
    restored = undo_garbling(text)
    if restored != text:
        counts["mended: wrong decoding"] += 1
    text = restored
    for name, pattern, replacement in _DAMAGE:
        text, num_found = pattern.subn(replacement, text)
        if num_found:
            counts[f"mended: {name}"] += 1
    if not unicodedata.is_normalized("NFC", text):
        counts["mended: not composed (NFC)"] += 1
        text = unicodedata.normalize("NFC", text)
    return text


def undo_garbling(text: str) -> str:
    """Return the text with garbled characters restored: UTF-8 that was wrongly decoded as Windows-1252, up to three
    times. For example, "cafÃ©" becomes "café".
    """
    for _ in range(3):
        better = _GARBLED.sub(_decode_garbled, text)
        if better == text:
            break
        text = better
    return text


def _decode_garbled(match: re.Match[str]) -> str:
    """Return what a match of garbled characters stands for ("Ã©" becomes "é"), or the match itself if it is genuine
    text.
    """
    garbled = match[0]
    before = match.string[match.start() - 1 : match.start()]
    if len(garbled) == 2 and garbled[0] == "Ã" and garbled[1] in _QUOTES and before.isupper():
        return garbled  # genuine text: "IRMÃ" and the quote mark after it
    try:
        return garbled.translate(_BYTE_OF).encode("latin-1").decode("utf-8")
    except UnicodeError:  # surrogates or overlong forms, so the text was not UTF-8
        return garbled


@dataclass(frozen=True)
class CleanStep(SelectionStep):
    """The step `clean`: rules with limits, line rules, and allowed scripts with their least share of letters."""

    rules: tuple[tuple[str, float], ...] = ()
    line_rules: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    min_script_share: float = 0.5
    name: ClassVar[str] = "clean"

    def select_documents(self, documents: Documents, key: str, tally: Tally) -> Iterator[Document]:
        for _, document in documents:
            text = self._remove_lines(repair_text(document[key], tally.changed), tally)
            cause = self.drop_cause(text)
            if cause is None:
                yield document | {key: text}
            else:
                tally.drop(cause)

    def drop_cause(self, text: str) -> str | None:
        """Return why a text is to be dropped, for the report: "empty", the name of the first rule that it breaks, or
        "script: " and the script of most letters. Return None if the text is kept.
        """
        if not text.strip():
            return "empty"
        properties = TextProperties(text)
        broken_rule = next((name for name, limit in self.rules if RULES[name].breaks(properties, limit)), None)
        if broken_rule is None and self.scripts:
            shares = script_shares(text)
            if sum(shares.get(script, 0.0) for script in self.scripts) < self.min_script_share:
                return f"script: {next(iter(shares), 'none')}"
        return broken_rule

    def _remove_lines(self, text: str, tally: Tally) -> str:
        """Return the text without the lines that break one of the step's line rules. Count each removed line under its
        rule in `tally.changed`.
        """
        if not self.line_rules:
            return text
        kept_lines = []
        for line in text.split("\n"):
            broken_rule = next((name for name in self.line_rules if line.strip() and LINE_RULES[name](line)), None)
            if broken_rule is None:
                kept_lines.append(line)
            else:
                tally.changed[f"lines taken out: {broken_rule}"] += 1
        if len(kept_lines) == text.count("\n") + 1:
            return text
        return _BLANK_LINES.sub("\n\n", "\n".join(kept_lines)).strip("\n")


def build_clean(words: Iterable[str], scripts: Sequence[str] = (), min_script_share: float = 0.5) -> CleanStep:
    """Build the step `clean` from words as given to `--rule`: names of rules (min_words), rules with a limit
    (min_words=20), groups of rules (gopher), rules for lines (c4_lines). A kept document has at least
    `min_script_share` of its letters in `scripts`, such as latin; empty: any script.

    Raise UsageError for an unknown word.
    """
    rules: dict[str, float] = {}
    line_rules: list[str] = []
    for word in words:
        name, _, limit = word.partition("=")
        if name == "none":
            continue
        if name == "c4_lines" or name in LINE_RULES:
            named = LINE_RULES if name == "c4_lines" else [name]
            line_rules += [rule for rule in named if rule not in line_rules]
        elif name in GROUPS and not limit:
            rules |= {rule: RULES[rule].limit for rule in GROUPS[name] if rule not in rules}
        elif name in RULES:
            rules[name] = _parse_limit(word, limit) if limit else RULES[name].limit
        else:
            names = [*RULES, *GROUPS, *LINE_RULES, "c4_lines", "none"]
            rest = word.removeprefix(name)
            hint = spelling_hint(name, names, partial(_way_to_rule, word, rest))
            raise UsageError(f"--rule={word} does not name a rule. {hint}")
    if not 0 <= min_script_share <= 1:
        raise UsageError(f"--min-script-share={min_script_share} is not a share. Give a number from 0 to 1.")
    for name in scripts:
        check_script(name)
    allowed = tuple(name.lower() for name in scripts)
    return CleanStep(tuple(rules.items()), tuple(line_rules), allowed, min_script_share)


def _way_to_rule(word: str, limit: str, name: str) -> str:
    return way(f"{name}{limit}", instead_of=word)


def _parse_limit(word: str, limit: str) -> float:
    """Parse the limit of a rule, the text after the equals sign in `word` ("min_words=20"). Raise UsageError if it is
    no number.
    """
    try:
        return float(limit)
    except ValueError as error:
        as_in = example("min_words=20")
        raise UsageError(f"--rule={word} has no number after the equals sign. Give one, as in {as_in}.") from error
