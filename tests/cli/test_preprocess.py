"""`lmtrain preprocess` as it is typed: a pipe, a summary, a kill, bad lines, and the memory that it takes."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.read import cut_files_into_chunks
from lmtrain.data.store.indexed_dataset import IndexedDataset
from tests.cli.harness import Toy, lmtrain, start
from tests.peak import peak_bytes


def test_a_pipe_and_a_summary(toy: Toy, tmp_path: Path) -> None:
    lines = [json.dumps({"text": "def f(x):\n    return x\n" * n}) for n in range(1, 60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    common = ("--tokenizer", str(toy.tokenizer), "--output")
    output = lmtrain("preprocess", tmp_path / "a.jsonl", *common, tmp_path / "a")
    assert re.match(r"59 documents, [\d.]+ KiB of text -> [\d.]+k tokens", output)
    assert "tokens a document:" in output
    piped = subprocess.run(
        [sys.executable, "-m", "lmtrain.cli.main", "preprocess", "-", *common, str(tmp_path / "b"), "--json"],
        input="\n".join(lines), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    facts: dict[str, Any] = json.loads(piped.stdout)
    assert (facts["num_documents"], facts["rejects"], facts["num_shards"]) == (59, {}, 1)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_a_dataset_is_called_as_its_only_input(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/a.txt").write_text("one\n\ntwo words\n\n")
    (tmp_path / "notes.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    for name in ("pages", "notes.jsonl.gz"):
        lmtrain("preprocess", tmp_path / name, "--tokenizer", toy.tokenizer)
    assert sorted(path.name for path in tmp_path.glob("*.idx")) == ["notes.idx", "pages.idx"]
    said = lmtrain("preprocess", tmp_path / "pages", tmp_path / "notes.jsonl.gz", "--tokenizer", toy.tokenizer, code=2)
    assert "Give --output PREFIX." in said
    assert "Give --output PREFIX." in lmtrain("preprocess", "-", "--tokenizer", toy.tokenizer, code=2)


def test_both_files_of_gpt2s_tokenizer_are_named(toy: Toy, tmp_path: Path) -> None:
    model = json.loads(Path(toy.tokenizer, "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{pair}\n" for pair in pairs))
    for name, tokenizer in (("file", tmp_path / "vocab.json"), ("folder", tmp_path)):
        said = lmtrain("preprocess", toy.text, "--tokenizer", tokenizer, "--output", tmp_path / name)
        assert f"the tokenizer is that of {tmp_path}/vocab.json and {tmp_path}/merges.txt\n" in said
    said = lmtrain("preprocess", toy.text, "--tokenizer", toy.tokenizer, "--output", tmp_path / "one")
    assert "the tokenizer is that of" not in said


def test_a_text_is_one_document_or_one_of_each_part(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\nand more\n\ntwo words\n\n")
    common = ("preprocess", tmp_path / "a.txt", "--tokenizer", toy.tokenizer, "--output", tmp_path / "a", "--overwrite")
    said = lmtrain(*common)
    assert said.startswith("1 document, ")
    assert "the text is one document; --split=blank-line makes a document of each of its paragraphs" in said
    assert lmtrain(*common, "--split", "blank-line").startswith("2 documents, ")
    assert lmtrain(*common, "--split", "line").startswith("3 documents, ")
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"text": "a"}\n')
    said = lmtrain("preprocess", lines, "--tokenizer", toy.tokenizer, "--split", "line", code=2)
    assert "--split=line cuts text files into documents, and no input is one. Leave it out." in said


def test_shards_are_measured_in_tokens(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1B is a billion of them and no byte."""
    # a shard may end after each slice
    monkeypatch.setattr(cut_files_into_chunks, "SizeLimits", partial(cut_files_into_chunks.SizeLimits, slice_bytes=500))
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "def f(x):\n    return x\n" * 9}) + "\n") * 40)
    common = ("preprocess", tmp_path / "a.jsonl", "--tokenizer", toy.tokenizer, "--workers", 1, "--json", "--output")
    for size, is_one in (("1B", True), ("1k", False)):
        facts = json.loads(lmtrain(*common, tmp_path / size, "--shard-tokens", size))
        assert (facts["num_shards"] == 1) is is_one


def test_what_all_lines_have_alike_is_said_and_not_how_to_lose_them(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "good", "id": 3}\n' * 2)
    (tmp_path / "b.json").write_text('[{"text": "good"}]')
    common = ["--tokenizer", toy.tokenizer, "--output", tmp_path / "out"]
    said = lmtrain("preprocess", tmp_path / "a.jsonl", *common, code=65)
    assert "no key 'text' (its keys: 'content', 'id'). Name the key of the text with --key." in said
    said = lmtrain("preprocess", tmp_path / "a.jsonl", *common, "--on-error", "skip", code=65)
    assert "bad lines: 2, of which 2: no key 'text'). Check the files and options: --key is" in said
    assert "is one JSON array, which is not read" in lmtrain("preprocess", tmp_path / "b.json", *common, code=2)


def test_bad_lines_on_the_command_line(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n{"text": 1}\n{"text": "also good"}\n')
    common = ["preprocess", tmp_path / "a.jsonl", "--tokenizer", toy.tokenizer, "--output", tmp_path / "out"]
    said = lmtrain(*common, code=65)
    assert "a.jsonl:2 (byte 17): not valid JSON" in said.replace("\n", " ")
    assert "--on-error skip" in said
    said = lmtrain(*common, "--on-error", "quarantine", "--max-bad", 2)
    assert "2 bad lines left out: 1 not valid JSON, 1 the value of 'text' is not text" in said
    rejects = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    assert [reject["content"] for reject in rejects] == ["bad", '{"text": 1}']
    lmtrain(*common, "--overwrite", "--on-error", "skip", "--max-bad", 1, code=65)
    assert "is not a size" in lmtrain(*common, "--max-doc-bytes", "much", code=2)


@pytest.mark.wide
def test_killed_and_started_again(toy: Toy, tmp_path: Path) -> None:
    """By SIGKILL after the second of several slices, and when all was written but for the index."""
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "the same text again " * 50}) + "\n") * 12_000)
    common = ["preprocess", tmp_path / "a.jsonl", "--tokenizer", toy.tokenizer, "--output"]
    lmtrain(*common, tmp_path / "whole")
    for fault in ("kill:point=data.slice:count=2", "kill:point=data.finish"):
        process = start(*common, tmp_path / "cut", env={"LMTRAIN_FAULT": fault, "LMTRAIN_ALLOW_FAULTS": "1"})
        said, _ = process.communicate(timeout=600)
        assert process.returncode == -signal.SIGKILL, said
    said = lmtrain(*common, tmp_path / "cut")
    assert "resuming after the 12,000 documents" in said
    for suffix in (".bin", ".idx", ".json", ".tokenizer.json"):
        assert (tmp_path / f"cut{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not (tmp_path / ".cut.tmp").exists()


@pytest.mark.wide
def test_a_pipe_that_says_nothing_can_be_left(toy: Toy, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmtrain.cli.main", "preprocess", "-", "--tokenizer", str(toy.tokenizer)]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "out")], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(b'{"text": "some words"}\n' * 5_000)  # more than the pipe holds
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr is not None
    assert b"Fatal" not in process.stderr.read()
    process.stdin.close()
    process.stderr.close()


def documents_of(num_bytes: int, path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 26, 1 << 20).astype(np.uint8) + ord("a")
    words[::6] = ord(" ")
    text = words.tobytes().decode()
    with path.open("w") as file:
        for start_at in range(num_bytes // 5000):
            at = start_at * 4999 % (len(text) - 5000)
            file.write(json.dumps({"text": text[at : at + 5000]}) + "\n")


@pytest.mark.wide
def test_memory_does_not_grow_with_the_corpus(toy: Toy, tmp_path: Path) -> None:
    peaks = []
    for size in (8 << 20, 96 << 20):
        documents_of(size, tmp_path / "a.jsonl")
        more = ["--tokenizer", toy.tokenizer, "--output", tmp_path / "out", "--overwrite", "--workers", 2]
        peaks.append(peak_bytes("preprocess", tmp_path / "a.jsonl", *more))
    assert IndexedDataset.open(tmp_path / "out").info is not None
    assert peaks[1] < 300 << 20
    assert peaks[1] - peaks[0] < 48 << 20


@pytest.mark.wide
def test_memory_grows_with_twice_the_longest_document(toy: Toy, tmp_path: Path) -> None:
    size = 64 << 20
    with (tmp_path / "a.jsonl").open("w") as file:
        for _ in range(2):
            file.write('{"text": "' + "some words of a long text, " * (size // 27) + '"}\n')
    more = ["--tokenizer", toy.tokenizer, "--output", tmp_path / "out", "--workers", 2]
    assert peak_bytes("preprocess", tmp_path / "a.jsonl", *more) < (300 << 20) + 2 * size
