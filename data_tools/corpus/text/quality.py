"""Rules that tell prose from boilerplate, lists, menus and machine output. Called by clean.py.

The rules and their limits follow the descriptions published with Gopher (Rae and others, 2021), C4 (Raffel and others,
2020) and FineWeb (Penedo and others, 2024). Each has a name and one limit that can be set; a document that breaks one
is left out and counted under that name. Line rules take lines out of a document instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from data_tools.corpus.flow.words import Hashes, hash_runs, mix

_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("•", "‣", "▪", "●", "◦", "-", "*", "·")
# ends of sentences in Western, East Asian, Arabic and Indic script, and what may close behind them
_ENDS = tuple(".!?\"')\u201d\u2019\u2026\u3002\uff01\uff1f\u061f\u0964\u00bb")
_AROUND_WORDS = ".,;:!?\"'()[]\u201c\u201d\u2018\u2019"
_POLICY = re.compile(
    r"terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies", re.IGNORECASE
)


class Facts:
    """A text as its rules look at it; what is counted is counted once."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def word_ids(self) -> Hashes:
        """A number for each word, the same for the same word within this text."""
        known: dict[str, int] = {}
        return mix(np.array([known.setdefault(word, len(known) + 1) for word in self.words], np.uint64))

    @cached_property
    def word_chars(self) -> npt.NDArray[np.int64]:
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [part for part in map(str.strip, re.split(r"\n\s*\n", self.text)) if part]

    @cached_property
    def bare_words(self) -> list[str]:
        return [word.strip(_AROUND_WORDS).lower() for word in self.words]

    def share_of_lines(self, test: Callable[[str], bool]) -> float:
        return sum(map(test, self.lines)) / max(len(self.lines), 1)

    def share_of_words(self, test: Callable[[str], bool]) -> float:
        return sum(map(test, self.words)) / max(len(self.words), 1)

    @cached_property
    def num_word_chars(self) -> int:
        return max(int(self.word_chars.sum()), 1)


def _repeated(parts: list[str]) -> tuple[float, float]:
    """The share of parts that stood before already, by number and by characters."""
    seen: set[str] = set()
    number = chars = 0
    for part in parts:
        if part in seen:
            number += 1
            chars += len(part)
        seen.add(part)
    return number / max(len(parts), 1), chars / max(sum(map(len, parts)), 1)


def _top_run(length: int, facts: Facts) -> float:
    """The share of characters in the most frequent run of so many words; of equally frequent ones the first counts."""
    runs = hash_runs(facts.word_ids, length)
    if not runs.size:
        return 0.0
    _, first, counts = np.unique(runs, return_index=True, return_counts=True)
    best = np.lexsort((first, -counts))[0]
    chars = int(facts.word_chars[first[best] : first[best] + length].sum())
    return float(counts[best] * chars / facts.num_word_chars) if counts[best] > 1 else 0.0


def _repeated_runs(length: int, facts: Facts) -> float:
    """The share of characters inside runs of so many words that stood before already, each word counted once."""
    runs = hash_runs(facts.word_ids, length)
    if not runs.size:
        return 0.0
    again = np.ones(runs.size, bool)
    again[np.unique(runs, return_index=True)[1]] = False
    starts = np.zeros(len(facts.words) + 1, np.int64)
    starts[np.flatnonzero(again)] += 1
    starts[np.flatnonzero(again) + length] -= 1
    return float(facts.word_chars[np.cumsum(starts[:-1]) > 0].sum() / facts.num_word_chars)


def _symbols(facts: Facts) -> float:
    return max(facts.text.count("#"), facts.text.count("…") + facts.text.count("...")) / max(len(facts.words), 1)


def _mean_word_chars(facts: Facts) -> float:
    return facts.num_word_chars / max(len(facts.words), 1)


@dataclass(frozen=True)
class Rule:
    name: str
    limit: float
    measure: Callable[[Facts], float]
    at_least: bool = False  # the limit is the least allowed; else the most

    def breaks(self, facts: Facts, limit: float) -> bool:
        value = self.measure(facts)
        return value < limit if self.at_least else value > limit


_least = partial(Rule, at_least=True)
_TOP_RUNS = ((2, 0.20), (3, 0.18), (4, 0.16))
_REPEATED_RUNS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        # Gopher: a text of words
        _least("min_words", 50, lambda f: len(f.words)),
        Rule("max_words", 100_000, lambda f: len(f.words)),
        _least("min_mean_word_chars", 3, _mean_word_chars),
        Rule("max_mean_word_chars", 10, _mean_word_chars),
        Rule("symbols_per_word", 0.1, _symbols),
        Rule("bullet_lines", 0.9, lambda f: f.share_of_lines(lambda line: line.startswith(_BULLETS))),
        Rule("ellipsis_lines", 0.3, lambda f: f.share_of_lines(lambda line: line.endswith(("…", "...")))),
        _least("words_with_letters", 0.8, lambda f: f.share_of_words(lambda word: any(map(str.isalpha, word)))),
        _least("stop_words", 2, lambda f: len(_STOP_WORDS.intersection(f.bare_words))),
        # Gopher: repetition
        Rule("repeated_lines", 0.30, lambda f: _repeated(f.lines)[0]),
        Rule("repeated_line_chars", 0.20, lambda f: _repeated(f.lines)[1]),
        Rule("repeated_paragraphs", 0.30, lambda f: _repeated(f.paragraphs)[0]),
        Rule("repeated_paragraph_chars", 0.20, lambda f: _repeated(f.paragraphs)[1]),
        *(Rule(f"top_{n}_words", limit, partial(_top_run, n)) for n, limit in _TOP_RUNS),
        *(Rule(f"repeated_{n}_words", limit, partial(_repeated_runs, n)) for n, limit in _REPEATED_RUNS),
        # C4
        Rule("lorem_ipsum", 0, lambda f: f.text.lower().count("lorem ipsum")),
        Rule("curly_brackets", 0, lambda f: f.text.count("{")),
        # FineWeb
        _least("lines_ending_in_punctuation", 0.12, lambda f: f.share_of_lines(lambda line: line.endswith(_ENDS))),
        Rule("short_lines", 0.67, lambda f: f.share_of_lines(lambda line: len(line) <= 30)),
    )
}

GROUPS: dict[str, tuple[str, ...]] = {
    "gopher": tuple(RULES)[: tuple(RULES).index("lorem_ipsum")],
    "c4": ("lorem_ipsum", "curly_brackets"),
    "fineweb": ("lines_ending_in_punctuation", "short_lines", "repeated_line_chars"),
}

LINE_RULES: dict[str, Callable[[str], bool]] = {  # C4: true for a line that goes
    "line_without_end": lambda line: not line.rstrip().endswith(_ENDS),
    "line_too_short": lambda line: len(line.split()) < 3,
    "line_javascript": lambda line: "javascript" in line.lower(),
    "line_policy": lambda line: _POLICY.search(line) is not None,
}
