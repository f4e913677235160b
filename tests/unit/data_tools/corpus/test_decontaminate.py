"""Evaluation passages in training text are found in any disguise and cut out with their surroundings."""

from __future__ import annotations

import gzip
import json
import random
import unicodedata
from functools import cache
from pathlib import Path

import pytest

from data_tools.corpus.copies.decontaminate import (
    MIN_CHARS,
    NUM_WORDS,
    SIDE_CHARS,
    DecontaminateStep,
    merge_spans,
    read_passages,
)
from lmtrain.errors import DataError, UsageError
from tests.benchmarks.data_corpora import Prose, disguised, passages
from tests.unit.data_tools.corpus_files import read_jsonl, run, texts, write_jsonl

EVALUATION = (
    "It was the last evening of the year, and nobody in the old house by the river had thought of lighting the lamps; "
    "they couldn't find the matches, she said, because the cat's basket stood on them all day long."
)


@pytest.fixture
def against(tmp_path: Path) -> Path:
    path = tmp_path / "eval.txt"
    path.write_text(EVALUATION, encoding="utf-8")
    return path


@cache
def filler(number: int, count: int = 200) -> str:
    """A text of its own for each number."""
    words = _filler_words()
    return " ".join(words[(number * 331) % 20_000 :][:count])


@cache
def _filler_words() -> list[str]:
    return Prose(1).words(40_000)


def cleaned(tmp_path: Path, against: Path, documents: list[str], action: str = "cut") -> list[str]:
    """What becomes of the documents, when one follows in which nothing is found."""
    all_of_them = [*documents, filler(50)]
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": text, "id": i} for i, text in enumerate(all_of_them)])
    run(DecontaminateStep(read_passages([against]), action), [path], tmp_path / "out.jsonl")
    *found, last = texts(tmp_path / "out.jsonl")
    assert last == filler(50)
    return found


def test_thirteen_words_are_found_and_twelve_are_not(tmp_path: Path, against: Path) -> None:
    words = EVALUATION.split()
    clean = f"{filler(1)} {' '.join(words[5:17])} {filler(2)}"
    assert cleaned(tmp_path, against, [clean], "drop") == [clean]
    for start in range(16):
        spoilt = f"{filler(1)} {' '.join(words[start : start + NUM_WORDS])} {filler(2)}"
        assert cleaned(tmp_path, against, [spoilt], "drop") == []


@pytest.mark.parametrize(
    "disguise",
    [
        EVALUATION.upper(),
        EVALUATION.replace(" ", "\n"),
        EVALUATION.replace("couldn't", "could n't").replace("cat's", "cat 's").replace(",", " ,"),
        EVALUATION.replace("'", "\u2019"),
        EVALUATION.replace(" ", ' "-- '),
    ],
)
def test_passages_are_found_in_any_disguise(tmp_path: Path, against: Path, disguise: str) -> None:
    assert cleaned(tmp_path, against, [f"{filler(1)} {disguise} {filler(2)}"], "drop") == []


def test_accents_are_found_whether_written_apart_or_not(tmp_path: Path, against: Path) -> None:
    apart, composed = (unicodedata.normalize(form, EVALUATION.replace("e", "é")) for form in ("NFD", "NFC"))
    for evaluation, text in ((apart, composed), (composed, apart)):
        against.write_text(evaluation, encoding="utf-8")
        assert cleaned(tmp_path, against, [f"{filler(1)} {text} {filler(2)}"], "drop") == []


def test_what_is_cut_is_the_passage_and_two_hundred_characters_on_each_side(tmp_path: Path, against: Path) -> None:
    before, after = filler(1), filler(2)
    found = cleaned(tmp_path, against, [f"{before} {EVALUATION} {after}", before])
    assert found == [before[: 1 - SIDE_CHARS], after[SIDE_CHARS - 2 :], before]
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert [(row["id"], row.get("piece")) for row in rows] == [(0, 0), (0, 1), (1, None), (2, None)]
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["changed"] == {"found: eval.txt": 1, "passages cut out": 1, "pieces added": 1}


def test_short_pieces_and_documents_with_many_hits_are_dropped(tmp_path: Path, against: Path) -> None:
    short = "a" * (MIN_CHARS + SIDE_CHARS - 30)
    assert cleaned(tmp_path, against, [f"{short} {EVALUATION} {short}"]) == []
    riddled = "".join(f"{filler(i, 120)} {EVALUATION} " for i in range(12))
    assert cleaned(tmp_path, against, [riddled]) == []
    assert len(cleaned(tmp_path, against, [riddled[: len(riddled) // 2]])) == 6


def test_json_lines_are_searched_in_every_string_and_short_texts_whole(tmp_path: Path) -> None:
    question = "Which of the seven rivers runs longest underground?"
    items = [{"q": question, "n": 3, "choices": [{"text": EVALUATION}, "too short to say"]}]
    path = tmp_path / "eval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(items[0]).encode()))
    kept = f"{filler(3)} too short to say {filler(4)}"
    spoilt = [f"{filler(1)} {question} {filler(2)}", f"{filler(1)} {EVALUATION} {filler(2)}"]
    assert cleaned(tmp_path, path, [*spoilt, kept], "drop") == [kept]


@pytest.mark.wide
def test_real_evaluation_sets_leave_nothing_behind(tmp_path: Path, shared_data: Path) -> None:
    files = [shared_data / name for name in ("lambada_test.jsonl", "wt103.wiki.test.tokens", "wt2.test.txt")]
    chance, prose = random.Random(5), Prose(5)
    planted = [
        f"{' '.join(prose.document())} {disguised(passage, chance)} {' '.join(prose.document())}"
        for passage in passages(files, 300)
    ]
    clean = [" ".join(prose.document()) for _ in range(300)]
    mixed = [text for pair in zip(planted, clean, strict=True) for text in pair]
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in mixed])
    known = read_passages(files)
    run(DecontaminateStep(known, "drop"), [path], tmp_path / "dropped.jsonl")
    assert texts(tmp_path / "dropped.jsonl") == clean
    run(DecontaminateStep(known), [path], tmp_path / "cut.jsonl")
    tally = run(DecontaminateStep(known), [tmp_path / "cut.jsonl"], tmp_path / "again.jsonl").tally
    assert tally.changed == {}  # nothing of the evaluation sets is left
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "cut.jsonl").read_bytes()


def test_spans_that_touch_are_one() -> None:
    assert merge_spans([(5, 9), (0, 2), (9, 12), (6, 7)]) == [(0, 2), (5, 12)]


def test_wrong_evaluation_files_are_refused(
    tmp_path: Path, against: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passages = read_passages([against])
    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="no text of 8 or more words"):
        read_passages([tmp_path / "short.txt"])
    with pytest.raises(DataError, match="not UTF-8 at byte 0"):
        read_passages([tmp_path / "odd.txt"])
    with pytest.raises(UsageError, match="--against"):
        read_passages([])
    monkeypatch.setattr("data_tools.corpus.copies.decontaminate._MAX_BYTES", 10)
    with pytest.raises(DataError, match=r"short\.txt is larger than 1 GiB, too large for a plain text of --against"):
        read_passages([tmp_path / "short.txt"])
    with pytest.raises(UsageError, match=r"--action=hide is unknown\. Use cut or drop"):
        DecontaminateStep(passages, "hide")
