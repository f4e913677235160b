"""Deduplication: planted copies are dropped, all else stays, with any number of tasks and workers and any memory."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.corpus.build_from_yaml import DedupeSettings, dedupe_documents, drop_copies, sign_documents
from data_tools.corpus.copies.dedupe import (
    MinHash,
    SignedDocuments,
    SignStep,
    content_hash,
    find_pairs,
    find_roots,
    join_groups,
    mark_exact,
    mark_near,
)
from data_tools.corpus.flow.run_one_corpus_step_in_workers import ReadOptions, Report, StepOptions, merge_outputs
from data_tools.read.cut_files_into_chunks import SizeLimits, TaskPart
from data_tools.read.parse_chunks_and_bad_lines import OnError
from lmtrain.errors import DataError, MissingInputError, UsageError
from tests.benchmarks.data_corpora import judge, write_planted
from tests.peak import peak_bytes
from tests.unit.data_tools.corpus_files import read_jsonl, texts, write_jsonl

SETTINGS = DedupeSettings()


def prose(seed: int, num_words: int = 200) -> list[str]:
    chance = random.Random(seed)
    return [f"word{chance.randrange(3000)}" for _ in range(num_words)]


def with_one_word_changed(words: list[str], at: int) -> str:
    return " ".join([*words[:at], "changed", *words[at + 1 :]])


def dedupe(tmp_path: Path, documents: Iterable[str], settings: DedupeSettings = SETTINGS) -> tuple[list[int], Report]:
    """The numbers of the documents that stay."""
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": text, "n": n} for n, text in enumerate(documents)])
    report = dedupe_documents([path], tmp_path / "out.jsonl", settings, StepOptions())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.report.json"]
    return [document["n"] for document in read_jsonl(tmp_path / "out.jsonl")], report


def test_planted_copies_at_a_small_size(tmp_path: Path) -> None:
    """The bars of test_planted_copies_at_full_size, at a hundredth."""
    write_planted(tmp_path / "in.jsonl", 1000, seed=3)
    report = dedupe_documents([tmp_path / "in.jsonl"], tmp_path / "out.jsonl", SETTINGS, StepOptions())
    found = judge(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert found.num_planted > 200
    assert found.recall >= 0.95
    assert found.precision >= 0.99
    assert report.tally.dropped.total() == found.num_dropped


@pytest.mark.slow
def test_planted_copies_at_full_size(tmp_path: Path) -> None:
    before, after = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_planted(before, 100_000, seed=1)
    peak = peak_bytes("corpus", "dedupe", before, "--output", after, "--workers", "1")
    found = judge(before, after)
    assert found.recall >= 0.95
    assert found.precision >= 0.99
    assert peak <= 1 << 30


def test_exact_copies_differ_in_space_case_and_composition_only(tmp_path: Path) -> None:
    documents = ["Café au lait", "cafe\u0301  AU\nlait", "Café au lait!", "", " \n", "..."]
    kept, report = dedupe(tmp_path, documents, DedupeSettings(near=False))
    assert kept == [0, 2, 3, 5]
    assert report.tally.dropped == {"exact copy": 2}


def test_one_of_a_group_stays_by_the_rule(tmp_path: Path) -> None:
    words = prose(1)
    copies = [with_one_word_changed(words, at) for at in (3, 100, 150)]
    documents = [copies[0], " ".join(prose(2)), copies[1], " ".join([*words, "and more"]), copies[2]]
    assert dedupe(tmp_path, documents)[0] == [0, 1]
    kept, report = dedupe(tmp_path, documents, DedupeSettings(keep="longest"))
    assert kept == [1, 3]
    assert report.tally.dropped == {"near copy": 3}


def test_a_chain_of_copies_is_one_group(tmp_path: Path) -> None:
    words = prose(7, 400)
    chain = [" ".join(words)]
    for step in range(6):
        words[step * 60 : step * 60 + 8] = prose(100 + step, 8)
        chain.append(" ".join(words))
    assert dedupe(tmp_path, chain)[0] == [0]


def test_texts_that_share_half_of_their_words_stay(tmp_path: Path) -> None:
    first, second = prose(1, 300), prose(2, 300)
    assert dedupe(tmp_path, [" ".join(first), " ".join(first[:150] + second[150:]), " ".join(second)])[0] == [0, 1, 2]


def test_texts_without_words_are_no_near_copies_of_each_other(tmp_path: Path) -> None:
    assert dedupe(tmp_path, ["!!!", "???", "...", "one", "one."])[0] == [0, 1, 2, 3]


def test_a_threshold_of_one_takes_texts_of_the_same_words(tmp_path: Path) -> None:
    words = prose(1)
    documents = [" ".join(words), ", ".join(words), with_one_word_changed(words, 50)]
    assert dedupe(tmp_path, documents, DedupeSettings(threshold=1.0))[0] == [0, 2]


def test_every_copy_but_the_first_is_found_however_little_memory_there_is(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": f"text {i % 3}"} for i in range(200)])
    sign_documents([path], tmp_path / "work", None, StepOptions())
    assert mark_exact(tmp_path / "work", memory_bytes=0) == 197
    drop_copies([path], tmp_path / "work", tmp_path / "out.jsonl", StepOptions())
    assert texts(tmp_path / "out.jsonl") == ["text 0", "text 1", "text 2"]


def test_marking_exact_copies_again_removes_the_near_copies(tmp_path: Path) -> None:
    words, work, output = prose(1), tmp_path / "work", tmp_path / "out.jsonl"
    documents = [" ".join(words), with_one_word_changed(words, 9)]
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in documents])
    sign_documents([path], work, MinHash(), StepOptions())
    mark_exact(work)
    find_pairs(work, SETTINGS.threshold)
    assert mark_near(work, "first") == 1
    drop_copies([path], work, output, StepOptions())
    assert texts(output) == documents[:1]
    mark_exact(work)
    drop_copies([path], work, output, StepOptions())
    assert texts(output) == documents


def planted_files(folder: Path, count: int) -> list[Path]:
    """Write so many documents with copies among them, in three files."""
    write_planted(folder / "all.jsonl", count, seed=11)
    documents = read_jsonl(folder / "all.jsonl")
    each = count // 3
    return [write_jsonl(folder / f"{i}.jsonl", documents[i * each : (i + 1) * each]) for i in range(3)]


@pytest.fixture
def planted(tmp_path: Path) -> list[Path]:
    return planted_files(tmp_path, 600)


@pytest.fixture
def few(tmp_path: Path) -> list[Path]:
    return planted_files(tmp_path, 60)


def test_tasks_of_an_array_come_to_the_same_as_one_run(tmp_path: Path, planted: list[Path]) -> None:
    options = StepOptions(1, ReadOptions(limits=SizeLimits(5000)))
    expected = dedupe_documents(planted, tmp_path / "one.jsonl", SETTINGS, options)
    work, output = tmp_path / "work", tmp_path / "many.jsonl"
    parts = [TaskPart(i, 4) for i in range(4)]
    for part in reversed(parts):
        sign_documents(planted, work, MinHash(), StepOptions(reading=ReadOptions(part=part)))
    exact = mark_exact(work, memory_bytes=20_000)
    for part in parts:
        find_pairs(work, SETTINGS.threshold, part, memory_bytes=20_000)
    near = mark_near(work, SETTINGS.keep, 4, memory_bytes=20_000)
    for part in parts:
        drop_copies(planted, work, output, StepOptions(reading=ReadOptions(part=part)))
    merge_outputs(output)
    assert output.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert expected.tally.dropped == {"exact copy": exact, "near copy": near}
    assert near > 50
    assert exact > 30


def test_every_document_is_signed_once_whatever_the_parts(tmp_path: Path, few: list[Path]) -> None:
    sign_documents(few, tmp_path / "one", MinHash(), StepOptions())
    for number in range(5):
        options = StepOptions(reading=ReadOptions(limits=SizeLimits(3000), part=TaskPart(number, 5)))
        sign_documents(few, tmp_path / "many", MinHash(), options)
    one, many = SignedDocuments(tmp_path / "one"), SignedDocuments(tmp_path / "many")
    everything = np.arange(len(one))
    assert len(one) == len(many) == 60
    assert np.array_equal(one.rows_at(everything), many.rows_at(everything))
    assert np.array_equal(one.signatures_at(everything[::-1]), many.signatures_at(everything[::-1]))
    assert np.array_equal(np.concatenate(list(one.rows(7))), many.rows_at(everything))


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_groups_are_those_of_a_plain_union_find(case: tuple[int, list[tuple[int, int]]]) -> None:
    count, edges = case
    expected = list(range(count))
    for a, b in edges:
        low, high = sorted((expected[a], expected[b]))
        expected = [low if label == high else label for label in expected]
    parent = np.arange(count)
    for some in (edges[: len(edges) // 2], edges[len(edges) // 2 :]):
        pairs = np.array(some, np.int64).reshape(-1, 2)
        join_groups(parent, pairs[:, 0], pairs[:, 1])
    assert find_roots(parent, np.arange(count)).tolist() == expected


def test_a_long_chain_is_joined_quickly() -> None:
    parent = np.arange(200_000)
    join_groups(parent, np.arange(199_999), np.arange(1, 200_000))
    assert not find_roots(parent, np.arange(200_000)).any()


def test_steps_out_of_order_name_the_missing_step(tmp_path: Path, few: list[Path]) -> None:
    work = tmp_path / "work"
    with pytest.raises(MissingInputError, match="corpus sign"):
        mark_exact(work)
    with pytest.raises(MissingInputError, match="corpus sign"):
        drop_copies(few, work, tmp_path / "out.jsonl", StepOptions())
    sign_documents(few, work, MinHash(), StepOptions(reading=ReadOptions(part=TaskPart(0, 2))))
    with pytest.raises(MissingInputError, match="1 of 2 parts"):
        mark_exact(work)
    sign_documents(few, work, MinHash(), StepOptions(reading=ReadOptions(part=TaskPart(1, 2))))
    with pytest.raises(MissingInputError, match=r"exact\.u64 does not exist"):
        find_pairs(work, 0.8)
    mark_exact(work)
    with pytest.raises(MissingInputError, match=r"lacks pairs\.u64"):
        mark_near(work, "first")
    with pytest.raises(UsageError, match=r"--keep=last is unknown\. Use first or longest"):
        mark_near(work, "last")
    options = StepOptions(reading=ReadOptions(part=TaskPart(0, 2)))
    with pytest.raises(UsageError, match=rf"--overwrite with --part removes .* Remove {work} first"):
        sign_documents(few[:2], work, MinHash(), options, overwrite=True)
    with pytest.raises(UsageError, match=r"--threshold=1\.5"):
        find_pairs(work, 1.5)
    with pytest.raises(DataError, match="signatures of other input files"):
        drop_copies(few[:2], work, tmp_path / "out.jsonl", StepOptions())
    sign_documents(few[:2], work, MinHash(), StepOptions(), overwrite=True)
    assert len(SignedDocuments(work)) == 40


def test_exact_signatures_find_no_near_copies(tmp_path: Path, few: list[Path]) -> None:
    sign_documents(few, tmp_path / "work", None, StepOptions())
    mark_exact(tmp_path / "work")
    with pytest.raises(UsageError, match="signed with --exact-only"):
        find_pairs(tmp_path / "work", 0.8)


def test_a_damaged_work_file_is_refused(tmp_path: Path, few: list[Path]) -> None:
    sign_documents(few, tmp_path / "work", None, StepOptions())
    with open(tmp_path / "work" / "rows.u64", "ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match="not a whole number of entries"):
        mark_exact(tmp_path / "work")
    (tmp_path / "work" / "rows.u64").write_bytes(b"")
    with pytest.raises(DataError, match=r"holds no signature of any document\. Check the files that were signed"):
        mark_exact(tmp_path / "work")


def test_leftovers_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    words = prose(1)
    left = tmp_path / "out.jsonl.work"
    left.mkdir()
    (left / "near.u64").write_bytes(np.array([0], np.uint64).tobytes())
    kept, _ = dedupe(tmp_path, [" ".join(words), with_one_word_changed(words, 9)], DedupeSettings(near=False))
    assert kept == [0, 1]


def test_bad_lines_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a b c"}\n{"text": 3}\n{"text": "A b  c"}\n')
    options = StepOptions(reading=ReadOptions(on_error=OnError.SKIP))
    report = dedupe_documents([path], tmp_path / "out.jsonl", SETTINGS, options)
    assert texts(tmp_path / "out.jsonl") == ["a b c"]
    assert report.tally.dropped == {"bad line: the value of 'text' is not text": 1, "exact copy": 1}


def test_hashes_are_of_content() -> None:
    assert content_hash("A  b\n") == content_hash("a b")
    assert content_hash("ab") != content_hash("a b")
    assert SignStep(None).files == ("rows",)
