"""Options that take a text refuse the name of a file; the options that read the text from files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from lmtrain.cli.generate_command import read_prompt
from lmtrain.errors import DataError
from tests.cli.harness import Toy, lmtrain


@pytest.fixture
def note(tmp_path: Path) -> Path:
    path = tmp_path / "my note.txt"
    path.write_bytes(b"\xef\xbb\xbfThe old house\n\nby the river \n\n")
    return path


def test_the_name_of_a_file_is_no_text(toy: Toy, note: Path) -> None:
    said = lmtrain("generate", "no_run", "--prompt", note, code=2)
    assert f"--prompt takes a text, but {note} is the name of a file" in said
    assert f'Type --prompt-file "{note}"' in said
    said = lmtrain("tokenizer", "show", toy.tokenizer, note, code=2)
    assert f'Type --data "{note}"' in said


def test_two_prompts_and_two_texts_are_refused(toy: Toy, note: Path) -> None:
    said = lmtrain("generate", "no_run", "--prompt", "x", "--prompt-file", note, code=2)
    assert f"--prompt and --prompt-file {note} both give the text" in said
    assert "takes one text, and there are 2" in lmtrain("tokenizer", "show", toy.tokenizer, "a", "text", code=2)


def test_a_wrong_seed_is_refused_before_the_model_is_looked_for() -> None:
    said = lmtrain("generate", "no_run", "--prompt", "x", "--seed", 2**32 - 1, "--num-samples", 2, code=2)
    assert "seed=4294967296 is not a whole number from 0 to 4294967295" in said


@pytest.mark.parametrize("file", [None, Path("-"), "note"])
def test_a_prompt_is_the_text_without_its_last_line_break(
    note: Path, file: Path | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(note.read_bytes())))
    assert read_prompt(note if file == "note" else file) == "The old house\n\nby the river \n"  # type: ignore[arg-type]


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"a\xff")
    with pytest.raises(DataError, match="picture cannot be a prompt: it is not text in UTF-8 from byte 1 on"):
        read_prompt(tmp_path / "picture")


def test_tokens_of_files_are_counted_by_file_and_together(toy: Toy, note: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"body": "one"}\n{"body": "two two"}\n')
    words = ("tokenizer", "show", toy.tokenizer, "--data", lines, note, "--key", "body")  # as the shell writes out *
    said = lmtrain(*words, "--json")
    found = json.loads(said[said.index("{") :])["data"]
    assert [(row["file"], row["documents"], row["bytes"]) for row in found["files"]] == [
        (str(lines), 2, 10), (str(note), 1, 30)
    ]  # fmt: skip
    assert found["total"]["tokens"] == sum(row["tokens"] for row in found["files"])
    total = next(line.split() for line in lmtrain(*words).splitlines() if line.split()[:1] == ["total"])
    assert total[1:4] == ["3", "40", "40"]
    said = lmtrain("tokenizer", "show", toy.tokenizer, "note", "--split", "line", code=2)
    assert "--split has no effect with a tokenizer without --data" in said
