"""Each quality rule drops the text it is meant for, keeps prose, and is counted under its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_tools.corpus.clean import DEFAULT_RULES, GROUPS, LINE_RULES, RULES, TextProperties, build_clean
from lmtrain.errors import UsageError
from tests.unit.data_tools.corpus_files import run, texts, write_jsonl

PROSE = (
    "The committee met on Thursday to discuss the plans for the new bridge. Most members agreed that the old one had "
    "served the town well, but its pillars were worn and repairs would cost more than a fresh start.\n\n"
    "An engineer explained with drawings how the river had moved since the first survey. Nobody spoke for a while.\n\n"
    "In the end they voted to ask three firms for offers, and to decide in spring when the water is low."
)
NUMBERED = "".join(f"Sentence number{i} says of thing{i} and of that which be{i} with matter{i}.\n" for i in range(40))

BROKEN = {
    "min_words": "Too short, and that is all of the story.",
    "max_words": "and the words with it " * 21_000,
    "min_mean_word_chars": "a to of I be the we " * 10,
    "max_mean_word_chars": "the incomprehensibilities of counterrevolutionaries " * 30,
    "symbols_per_word": PROSE + " #tag" * 20,
    "bullet_lines": "\n".join(f"- the item{i} of that list which has words" for i in range(20)),
    "ellipsis_lines": "\n".join(f"the item{i} of that list which goes on..." for i in range(20)),
    "words_with_letters": PROSE + " 12 34 56" * 20,
    "stop_words": "Lorem dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore " * 4,
    "repeated_lines": NUMBERED + "x1.\n" * 30,
    "repeated_line_chars": NUMBERED + ("A rather long line of the page that stands again and again here.\n" * 20),
    "repeated_paragraphs": NUMBERED.replace("\n", "\n\n") + "x2.\n\n" * 30,
    "repeated_paragraph_chars": "\n\n".join(["A long paragraph of the page which repeats with all that it has."] * 4),
    "top_2_words": NUMBERED + "remarkable happenings " * 80,
    "top_3_words": NUMBERED + "remarkable recent happenings " * 60,
    "top_4_words": NUMBERED + "remarkable recent local happenings " * 50,
    "lorem_ipsum": PROSE + " Lorem Ipsum",
    "curly_brackets": PROSE + " {",
    "lines_ending_in_punctuation": "\n".join(f"the item{i} of that list which goes on" for i in range(20)),
    "short_lines": "\n".join(["short line."] * 20),
}  # fmt: skip
REPEATED = "Every ten words of this line come back once more today. "


@pytest.mark.parametrize(("rule", "text"), BROKEN.items(), ids=BROKEN.keys())
def test_a_rule_catches_what_it_is_for_and_no_prose(rule: str, text: str) -> None:
    clean = build_clean([rule])
    assert clean.drop_cause(text) == rule
    assert clean.drop_cause(PROSE) is None


@pytest.mark.parametrize("length", range(5, 11))
def test_repeated_runs_are_caught(length: int) -> None:
    clean = build_clean([f"repeated_{length}_words"])
    assert clean.drop_cause(NUMBERED + REPEATED * 30) == f"repeated_{length}_words"
    assert clean.drop_cause(PROSE) is None


def test_every_rule_has_a_test_and_a_group() -> None:
    assert RULES.keys() - BROKEN.keys() == {f"repeated_{n}_words" for n in range(5, 11)}
    assert RULES.keys() == {rule for rules in GROUPS.values() for rule in rules}


def test_shares_are_what_one_counts_by_hand() -> None:
    facts = TextProperties("a b c a b c a b d")  # runs of two: ab x3, bc x2, ca x2, bd
    assert RULES["top_2_words"].measure(facts) == pytest.approx(6 / 9)
    assert RULES["top_3_words"].measure(facts) == pytest.approx(6 / 9)  # abc x2
    assert RULES["repeated_5_words"].measure(facts) == pytest.approx(5 / 9)  # abcab stood at the start already
    assert RULES["repeated_6_words"].measure(facts) == 0
    assert RULES["top_4_words"].measure(TextProperties("a a a")) == 0  # fewer words than a run has
    assert RULES["repeated_5_words"].measure(TextProperties("a a a a")) == 0
    longer = TextProperties("a b c d e f g a b c d e f g")  # three runs of five stood before, of seven words in all
    assert RULES["repeated_5_words"].measure(longer) == pytest.approx(7 / 14)
    assert RULES["repeated_lines"].measure(TextProperties("x\ny\nx\n\nx")) == pytest.approx(0.5)
    assert RULES["repeated_paragraph_chars"].measure(TextProperties("aaaa\n\nb\n\naaaa")) == pytest.approx(4 / 9)


def test_the_first_broken_rule_is_counted(tmp_path: Path) -> None:
    documents = [PROSE, BROKEN["min_words"], BROKEN["bullet_lines"], " \n", BROKEN["min_words"]]
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in documents])
    tally = run(build_clean(DEFAULT_RULES), [path], tmp_path / "out.jsonl").tally
    assert texts(tmp_path / "out.jsonl") == [PROSE]
    assert tally.dropped == {"min_words": 2, "bullet_lines": 1, "empty": 1}


def test_limits_can_be_set(tmp_path: Path) -> None:
    for words in (["gopher", "min_words=5"], ["min_words=5", "gopher"]):
        assert build_clean(words).drop_cause(PROSE[:60]) != "min_words"
        assert build_clean(words).drop_cause("only three words") == "min_words"
    assert build_clean(["none"]).drop_cause("x") is None


def test_lines_are_taken_out_and_counted(tmp_path: Path) -> None:
    page = [
        "Home | About", "The first sentence of the page stands here.", "Please enable JavaScript to see more of it.",
        "We use cookies and have a cookie policy here.", "Too short.", "", "The second sentence of the page ends it.",
    ]  # fmt: skip
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "\n".join(page)}])
    tally = run(build_clean(["c4_lines"]), [path], tmp_path / "out.jsonl").tally
    assert texts(tmp_path / "out.jsonl") == ["\n".join([page[1], "", page[6]])]
    assert tally.changed == {f"lines taken out: {rule}": 1 for rule in LINE_RULES}


def test_texts_in_other_scripts_are_dropped_and_counted() -> None:
    clean = build_clean([], ["Latin"], 0.7)
    assert clean.drop_cause("Mostly Latin words слово") is None
    assert clean.drop_cause("Почти всё кириллица word") == "script: cyrillic"
    assert clean.drop_cause("123 456") == "script: none"
    assert build_clean([], ["latin", "cyrillic"], 0.7).drop_cause("Почти всё word") is None


@pytest.mark.parametrize("word", ["min_word", "min_words=few", "gopher=3"])
def test_a_wrong_rule_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=f"--rule={word}"):
        build_clean([word])
    with pytest.raises(UsageError, match="min-script-share"):
        build_clean([], [], 1.5)
    with pytest.raises(UsageError, match="Did you mean latin"):
        build_clean([], ["latvian"])
