"""What is said of files that are not read as text, and whether the lines that it names make files that are."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from lmtrain.runtime.files.unreadable_files import (
    _KINDS,
    encoding_advice,
    explain_unreadable,
    guess_encoding,
    is_text_file,
    is_tokenizer,
)

FRENCH = "Le café était fermé à Noël, et l'hôtel aussi.\n" * 9
TEXTS = ["one", 'two\nlines, with a comma and "quotes"', "three é"]


def run_advised_line(folder: Path, message: str) -> None:
    """Run the first line in backticks that a message names."""
    match = re.search(r"`(python3 .*?|iconv .*?)`", message, re.DOTALL)
    assert match, message
    line = match[1].replace("python3", sys.executable, 1)
    subprocess.run(["bash", "-c", line], check=True, cwd=folder, env={"PATH": "/usr/bin:/bin"})


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("b c.csv", ";"), ("a.tsv", "\t")])
def test_a_table_becomes_lines_of_json(tmp_path: Path, name: str, delimiter: str) -> None:
    path = tmp_path / name
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows([("nr", "story"), *enumerate(TEXTS)])
    message = explain_unreadable(path)
    assert f"is a table in {path.suffix[1:].upper()}, which is not read." in message
    run_advised_line(tmp_path, message)
    assert rows(path.with_suffix(".jsonl")) == [{"nr": str(nr), "story": text} for nr, text in enumerate(TEXTS)]


def test_what_is_made_replaces_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none\n")
    (tmp_path / "a.jsonl").write_text("kept")
    run_advised_line(tmp_path, explain_unreadable(tmp_path / "a.csv"))
    assert (tmp_path / "a.jsonl").read_text() == "kept"
    assert rows(tmp_path / "a_new.jsonl") == [{"text": "one"}]


def test_json_is_told_by_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    run_advised_line(tmp_path, explain_unreadable(path))
    assert [row["text"] for row in rows(tmp_path / "a.jsonl")] == TEXTS
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert "--format" in explain_unreadable(path)
    path.write_text('{\n  "text": "one"\n}\n')
    assert "no list of documents" in explain_unreadable(path)


@pytest.mark.parametrize("header", [b"", (20240520).to_bytes(4, "little") + bytes(1020)])
def test_bare_tokens_become_texts(tmp_path: Path, header: bytes) -> None:
    from lmtrain.tokenizer.train import train_bpe

    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    ids = [number for text in TEXTS for number in (*tokenizer.encode(text), tokenizer.special["eod"])]
    (tmp_path / "train.bin").write_bytes(header + array("H", ids).tobytes())
    message = explain_unreadable(tmp_path / "train.bin")
    assert "it may be bare tokens, as nanoGPT and llm.c write them" in message
    run_advised_line(tmp_path, message.replace("TOKENIZER'", "tokenizer.json'", 1))
    assert [row["text"] for row in rows(tmp_path / "train.jsonl")] == TEXTS
    (tmp_path / "train.idx").touch()
    assert "is a file of the dataset" in explain_unreadable(tmp_path / "train.bin")


@pytest.mark.parametrize("suffix", [suffix for suffixes in _KINDS for suffix in suffixes.split()])
def test_each_kind_is_named(suffix: str) -> None:
    said = explain_unreadable(Path(f"folder/a file{suffix}"))
    assert re.fullmatch(r"folder/a file\S+ is an? .*\. .*\.", said) or "is XML" in said or "is sound" in said
    assert "{" not in said
    if ".tar" not in suffix:
        assert f"a file{suffix}.gz holds" in explain_unreadable(Path(f"folder/a file{suffix}.gz"))


def test_text_and_other_bytes(tmp_path: Path) -> None:
    for name, data in (("a.md", FRENCH.encode()), ("b.md", bytes(range(256))), ("c.md", FRENCH.encode("cp1252"))):
        (tmp_path / name).write_bytes(data)
    assert is_text_file(tmp_path / "a.md")
    assert explain_unreadable(tmp_path / "a.md") == ""
    assert "is not text" in explain_unreadable(tmp_path / "b.md")
    assert "iconv -f CP1252" in explain_unreadable(tmp_path / "c.md")


@pytest.mark.parametrize(
    ("text", "encoding", "guess"),
    [
        (FRENCH, "cp1252", "CP1252"), (FRENCH, "utf-16", "UTF-16"), ("“Well”, he said… " * 9, "cp1252", "CP1252"),
        ("Мы живём в Москве, и она тоже. " * 9, "cp1251", "CP1251"),
        ("Мы живём в Москве, и она тоже. " * 9, "koi8-r", "KOI8-R"), ("我住在北京,他也是。" * 9, "gb18030", "GB18030"),
        ("plain", "ascii", ""), ("\0\x01\x02\xff", "latin-1", ""),
    ],
)  # fmt: skip
def test_an_encoding_is_guessed(text: str, encoding: str, guess: str) -> None:
    assert guess_encoding(text.encode(encoding)) == guess


def test_a_text_in_another_encoding_becomes_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes(FRENCH.encode("cp1252"))
    run_advised_line(tmp_path, encoding_advice(path, 6))
    assert (tmp_path / "old.utf8.txt").read_text(encoding="utf-8") == FRENCH
    path.write_bytes(FRENCH.encode() + b"\xff and more\n")
    assert encoding_advice(path, len(FRENCH.encode())) == ""  # a single place in UTF-8 is damaged


def test_a_tokenizer_is_told_from_a_text(tmp_path: Path) -> None:
    (tmp_path / "bert.txt").write_text("[PAD]\n[UNK]\nthe\n")
    (tmp_path / "notes.txt").write_text("the [UNK]\n[UNK]\n")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/vocab.json").touch()
    names = ("bert.txt", "notes.txt", "gpt2", ".", "missing.txt")
    assert [is_tokenizer(tmp_path / name) for name in names] == [True, False, True, False, False]
