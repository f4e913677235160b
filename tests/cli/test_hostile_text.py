"""Empty texts, pipes, broken links, names that are no text, disks that take nothing: a message, and no success."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest
import zstandard

from tests.cli.harness import Toy, lmtrain
from tests.limited import limited
from tests.unit.data_tools.corpus_files import read_jsonl, write_jsonl

ONE = ("--workers", 1)
STEPS = [
    ("clean", *ONE), ("dedupe", *ONE), ("split", *ONE), ("decontaminate", "--against", "eval.txt", *ONE), ("shuffle",),
    ("sample", "--fraction", 0.5, *ONE), ("sample", "--count", 5, *ONE),
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval.txt").write_text("one two three four five six seven eight nine ten eleven twelve thirteen more")
    return tmp_path


@pytest.mark.parametrize("step", STEPS, ids=lambda step: " ".join(map(str, step[:2])))
def test_a_corpus_of_nothing_is_no_corpus(here: Path, step: tuple[object, ...]) -> None:
    Path("empty.jsonl").write_text(" \n\n")
    said = lmtrain("corpus", step[0], "empty.jsonl", "--output", "out/x", *step[1:], code=65)
    assert "the input holds no document. Check the files" in said
    assert not [path for path in here.rglob("*") if path.is_file() and path.name not in ("empty.jsonl", "eval.txt")]


@pytest.mark.parametrize("name", ["hole.jsonl", "hole.txt"])
def test_a_terabyte_that_was_never_written_is_not_read(toy: Toy, here: Path, name: str) -> None:
    Path(name).write_text('{"text": "one line"}\n')
    os.truncate(name, 1 << 40)
    began = time.process_time()
    for command in (
        ("preprocess", ".", "--tokenizer", toy.tokenizer, "--output", "out"),
        ("tokenizer", "train", name, "--output", "tokenizer", "--vocab-size", 300),
        ("corpus", "clean", name, "--output", "out/clean"),
    ):
        said = lmtrain(*command, code=65)
        assert f"{name} is incomplete: only " in said
        assert "were written. Copy the file again" in said
    assert time.process_time() - began < 5


def test_a_step_that_leaves_nothing_says_what_took_it(here: Path) -> None:
    write_jsonl(Path("in.jsonl"), [{"text": "too short"}] * 3)
    said = lmtrain("corpus", "clean", "in.jsonl", "--output", "out.jsonl", *ONE, code=65)
    assert "clean leaves none of 3 documents: 3 min_words. Check the input and the settings." in " ".join(said.split())
    assert not Path("out.jsonl").exists()


@pytest.mark.wide
def test_parts_may_be_empty_and_their_whole_may_not(here: Path) -> None:
    write_jsonl(Path("one.jsonl"), [{"text": "a single line"}])
    Path("empty.jsonl").write_text("")
    for name, code in (("one", 0), ("empty", 65)):
        for part in ("0/2", "1/2"):
            words = ["--output", f"{name}.out.jsonl", "--rule", "none", "--part", part, *ONE]
            lmtrain("corpus", "clean", f"{name}.jsonl", *words)
        lmtrain("corpus", "merge", f"{name}.out.jsonl", code=code)
    assert len(read_jsonl(Path("one.out.jsonl"))) == 1
    assert not Path("empty.out.jsonl").exists()


def test_a_vocabulary_of_nothing_is_none(here: Path, toy: Toy) -> None:
    for name, content in (("empty.txt", ""), ("blank.txt", " \n"), ("none.jsonl", '{"text": ""}\n')):
        Path(name).write_text(content)
        said = lmtrain("tokenizer", "train", name, "--output", "t", "--vocab-size", 300, code=65)
        assert "All input texts are empty" in said
    for name in ("empty.txt", "none.jsonl"):
        said = lmtrain("preprocess", name, "--tokenizer", toy.tokenizer, "--output", "d", code=65)
        assert "holds no text that could be used" in said
    assert sorted(path.name for path in here.iterdir()) == ["blank.txt", "empty.txt", "eval.txt", "none.jsonl"]


def test_a_pipe_is_refused_before_anybody_waits_for_it(here: Path, toy: Toy) -> None:
    os.mkfifo("pipe.jsonl")
    for words in (
        ("corpus", "clean", "pipe.jsonl", "--output", "o.jsonl"),
        ("tokenizer", "train", "pipe.jsonl", "--output", "t", "--vocab-size", 300),
        ("preprocess", "pipe.jsonl", "--tokenizer", toy.tokenizer, "--output", "d"),
    ):
        assert "pipe.jsonl is a pipe or a device" in lmtrain(*words, code=65)


def test_links_that_lead_nowhere_are_named(here: Path) -> None:
    write_jsonl(Path("in/a.jsonl"), [{"text": "some text"}])
    Path("in/gone.jsonl").symlink_to("nothing.jsonl")
    said = lmtrain("corpus", "shuffle", "in", "--output", "o.jsonl", code=66)
    assert "in/gone.jsonl is a link to nothing.jsonl, which does not exist" in said
    Path("in/gone.jsonl").unlink()
    Path("loop.jsonl").symlink_to("loop.jsonl")
    said = lmtrain("corpus", "shuffle", "loop.jsonl", "--output", "o", code=65)
    assert "loop.jsonl is part of a cycle of links" in said
    said = lmtrain("corpus", "shuffle", "in", "--output", "loop.jsonl", code=73)
    assert "loop.jsonl is a symbolic link, and nothing is written through links" in said


@pytest.mark.wide
def test_no_step_writes_through_a_link(here: Path) -> None:
    write_jsonl(Path("in.jsonl"), [{"text": "some text of no length"}])
    Path("precious").write_text("mine")
    for name in ("out.jsonl", "out.jsonl.report.json"):
        Path(name).symlink_to("precious")
        said = lmtrain("corpus", "shuffle", "in.jsonl", "--output", "out.jsonl", code=73)
        assert f"{name} is a symbolic link" in said
        Path(name).unlink()
    lmtrain("corpus", "sign", "in.jsonl", "--work", "w", *ONE)
    lmtrain("corpus", "match", "--exact", "--work", "w")
    lmtrain("corpus", "match", "--work", "w")
    Path("w/.groups.i64").symlink_to(Path("precious").absolute())
    assert ".groups.i64 is a symbolic link" in lmtrain("corpus", "join", "--work", "w", code=73)
    assert Path("precious").read_text() == "mine"


def test_a_disk_that_takes_no_more_is_named_and_left_clean(here: Path) -> None:
    write_jsonl(Path("in.jsonl"), [{"text": f"document {number} " * 50} for number in range(200)])
    for step in (("shuffle",), ("clean", "--rule", "none", *ONE), ("dedupe", *ONE)):
        with limited(resource.RLIMIT_FSIZE, 2048):
            said = lmtrain("corpus", step[0], "in.jsonl", "--output", "out.jsonl", *step[1:], code=74)
        assert "failed: a file may have 2.0 KiB here. Raise that limit with `ulimit -f unlimited`." in said
        assert sorted(path.name for path in here.iterdir()) == ["eval.txt", "in.jsonl"]


def test_names_that_are_no_text_go_through(here: Path) -> None:
    name = os.fsdecode(b"caf\xe9\x1b[31m.jsonl")
    write_jsonl(Path(name), [{"text": "a line of text"}, {"text": "another line of text"}])
    for words in (("dedupe",), ("clean", "--rule", "none"), ("split",)):
        assert "2 documents" in lmtrain("corpus", words[0], name, "--output", f"to_{words[0]}", *words[1:], *ONE)
    Path(name).write_text('{"text": 1}\n')
    assert "is not text" in lmtrain("corpus", "clean", name, "--output", "o.jsonl", *ONE, code=65)


def test_text_that_is_no_text_in_a_table_is_a_bad_row(here: Path, toy: Toy) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array([b"some good text", b"caf\xe9", b"more good text"], "binary").view("string")
    parquet.write_table(pyarrow.table({"text": column}), "t.parquet")
    made = ["--tokenizer", toy.tokenizer, "--output", "d"]
    for words in (["corpus", "clean", "t.parquet", "--output", "o.jsonl", *ONE], ["preprocess", "t.parquet", *made]):
        assert "t.parquet, row 2: invalid UTF-8. Repair or remove" in lmtrain(*words, code=65)
    lmtrain("corpus", "clean", "t.parquet", "--output", "o.jsonl", "--rule", "none", "--on-error", "skip", *ONE)
    assert [row["text"] for row in read_jsonl(Path("o.jsonl"))] == ["some good text", "more good text"]
    lmtrain("preprocess", "t.parquet", *made, "--on-error", "skip")
    [reject] = read_jsonl(Path("d.rejects.jsonl"))
    assert (reject["row"], reject["cause"]) == (2, "invalid UTF-8")


def test_fifty_thousand_empty_frames_are_soon_read(here: Path) -> None:
    line = json.dumps({"text": "a line of text"}).encode() + b"\n"
    Path("in.jsonl.zst").write_bytes(zstandard.compress(b"") * 50_000 + zstandard.compress(line))
    assert "1 document (" in lmtrain("corpus", "clean", "in.jsonl.zst", "--output", "o", "--rule", "none", *ONE)
