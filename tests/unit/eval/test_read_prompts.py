"""The prompts of `lmtrain generate`, from a file or standard input."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from lmtrain.errors import DataError
from lmtrain.eval.read_prompts import note_on_lines, read_prompt, read_prompts


@pytest.mark.parametrize("file", [None, Path("-"), "note"])
def test_a_prompt_is_the_text_without_its_last_line_break(
    tmp_path: Path, file: Path | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "my note.txt"
    note.write_bytes(b"\xef\xbb\xbfThe old house\n\nby the river \n\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(note.read_bytes())))
    assert read_prompt(note if file == "note" else file) == "The old house\n\nby the river \n"  # type: ignore[arg-type]


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"a\xff")
    with pytest.raises(DataError, match="picture cannot be a prompt: it is not text in UTF-8 from byte 1 on"):
        read_prompt(tmp_path / "picture")


def test_a_prompt_on_each_line(tmp_path: Path) -> None:
    text, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("The old house\r\n\n  by\u2028the river \n")
    assert read_prompts(text) == ["The old house", "  by\u2028the river "]
    rows.write_text('{"text": "a\\nb", "id": 1}\n{"prompt": "c", "text": "d"}\n')
    assert read_prompts(rows) == ["a\nb", "c"]
    rows.write_text('{"text": "a"}\n\n{"body": "b"}\n')
    with pytest.raises(DataError, match=r"prompts.jsonl:3 is not an object of JSON with a text under prompt or text"):
        read_prompts(rows)
    text.write_text("\n \n")
    with pytest.raises(DataError, match=r"prompts.txt holds no prompt"):
        read_prompts(text)


def test_lines_that_are_one_prompt_are_noted(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    assert note_on_lines(file, "one line\n\n") is None
    assert note_on_lines(None, "a\nb") is None
    note = note_on_lines(file, "a\n\nb\n")
    assert note == (
        f"the 2 lines of {file} are continued as one prompt; --prompts {file} takes each line as a prompt of its own"
    )
