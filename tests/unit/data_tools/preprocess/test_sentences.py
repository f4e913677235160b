"""Sentences are split where a reader would mark them; C++ and Python give the same sentences."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_tools.preprocess.encode_documents import _SPACE_CHARS, split_sentences, split_sentences_twin
from lmtrain.runtime import compiled_helpers
from tests.unit.data_tools.marked_sentences import HARD, PROSE

PIECES = [
    ". ", ".", "! ", "?", "\u2026", "...", " ", "\n", "\n\n", "\r\n", "\f", "\u2029", "\u2028", "\x85", "\u3000",
    "\xa0",
    "\u3002", "\uff1f", "\u0964", '"', "'", "\u201d", "\u201c", "\u2019", ")", "(", "]", "[12]", "[",
    "\u00bb", "\u00ab",
    "\u2014", "-", "*", "\u300c", "\u300d", ",", ";", "/", "a", "b", "A", "I ", "A. ", "The ", "In, ", "Mr", "Dr. ",
    "\0",
    "U.S. ", "e.g. ", "p.m. ", "No. ", "p. ", "5", "1. ", "12", "iv. ", "IV", "Inc. ", "al", "x" * 25, "É. ", "é", "ж",
    "Ж", "ā", "Ā", "ŉ", "÷", "\u00d7", "中", "\U0001f642", "\ud800", "word ", "Word ",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=16).map("".join)


def ends(sentences: list[str]) -> set[int]:
    """Where the sentences end, counted in characters that are not white space; the last end is no decision."""
    counts, found = 0, set()
    for sentence in sentences[:-1]:
        counts += len(re.sub(r"\s", "", sentence))
        found.add(counts)
    return found


def f1(paragraphs: list[list[str]]) -> float:
    pairs = [(ends(marked), ends(split_sentences(" ".join(marked)))) for marked in paragraphs]
    right = sum(len(marked & found) for marked, found in pairs)
    return 2 * right / sum(len(marked) + len(found) for marked, found in pairs)


def test_prose_is_split_where_a_reader_splits_it() -> None:
    assert f1(PROSE) > 0.99  # 65 ends in 101 sentences: all found, one too many


def test_hard_cases() -> None:
    assert f1(HARD) > 0.98  # 54 ends in 85 sentences: all found, one too many


def test_splitting_at_every_stop_would_fail_the_marked_sentences() -> None:
    """The measure can tell: white space after a stop is not enough."""
    naive = [(ends(marked), ends(re.split(r"(?<=[.!?\u2026])\s+", " ".join(marked)))) for marked in HARD]
    right = sum(len(marked & found) for marked, found in naive)
    assert 2 * right / sum(len(marked) + len(found) for marked, found in naive) < 0.8


@pytest.mark.parametrize("native", [True, False])
def test_lines_and_paragraphs(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(compiled_helpers, "lib", None)
    text = "A heading\n\nOne line\nand its rest. Two\n \nThree\fFour"
    assert split_sentences(text) == ["A heading", "One line\nand its rest.", "Two", "Three", "Four"]
    lines = ["A heading", "One line", "and its rest.", "Two", "Three", "Four"]
    assert split_sentences(text, newlines=True) == lines


@pytest.mark.parametrize("text", ["", " ", "\n\n\f", "\u3000\x85"])
def test_an_empty_text_has_no_sentence(text: str) -> None:
    assert split_sentences(text) == []
    assert split_sentences_twin(text) == []


@settings(max_examples=300, deadline=None)
@given(text=texts, newlines=st.booleans())
@example("x" * 25 + ". The", False)
@example("A reference.[123] The next.[1234] Its end", False)
@example("\u00ab Oui.\xa0\u00bb Il", False)
def test_the_twin_says_the_same_and_nothing_is_lost(text: str, newlines: bool) -> None:
    found = split_sentences_twin(text, newlines)
    assert split_sentences(text, newlines) == found
    assert [c for s in found for c in s if c not in _SPACE_CHARS] == [c for c in text if c not in _SPACE_CHARS]
    assert all(s and s[0] not in _SPACE_CHARS and s[-1] not in _SPACE_CHARS for s in found)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=40) | texts.map(lambda text: text.encode("utf-8", "surrogatepass")[:-1]))
def test_invalid_utf8_is_split_too(data: bytes) -> None:
    if compiled_helpers.lib is None:
        pytest.skip("lmtrain._native was not compiled")
    spans = compiled_helpers.lib.sentence_spans(data).tolist()
    places = [0, *(place for span in spans for place in span), len(data)]
    assert places == sorted(places)
    gaps = [data[stop:start].decode() for stop, start in zip(places[::2], places[1::2], strict=True)]
    assert set("".join(gaps)) <= set(_SPACE_CHARS)  # all between sentences is white space, and whole characters


def test_a_long_text_takes_time_in_proportion() -> None:
    """Long runs of what is looked at again and again; a square of their length would not end."""
    for unit in (". ", ".)", " (", "\n", ". (", "[1]", "a.", "\u3002"):
        text = "Begin." + unit * 30_000 + "end."
        assert split_sentences(text) == split_sentences_twin(text)
