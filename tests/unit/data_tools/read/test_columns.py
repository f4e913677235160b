"""Rows of .parquet files whose text is null or invalid: each is a bad row, as a line of JSON would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_tools.preprocess.tokenizer_and_dataset_from_text import estimate_text_bytes
from data_tools.read.compressed_and_parquet_readers import read_rows
from data_tools.read.find_input_files import find_sources
from lmtrain.errors import DataError, MissingInputError

BAD = b"caf\xe9"


def _table(path: Path, values: list[bytes | None], kind: str = "string", name: str = "text") -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column: Any = pyarrow.array(values, "large_binary" if kind == "large_string" else "binary").view(kind)
    parquet.write_table(pyarrow.table({name: column}), path)
    return path


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_a_text_that_is_not_utf8_is_returned_as_bytes(tmp_path: Path, kind: str) -> None:
    path = _table(tmp_path / "t.parquet", [b"one", BAD, None, "größer".encode()], kind)
    [(start, rows, num_bytes, share)] = read_rows(path, ["text"], 0, 1 << 20)
    assert rows == [("one",), (BAD,), (None,), ("größer",)]
    assert (start, num_bytes, share) == (0, 13, 1.0)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = _table(tmp_path / "t.parquet", [b"x" * 100] * 50)
    data = path.read_bytes()
    for damaged in (data[:200], data[:40] + b"\xff" * 20 + data[60:], data.replace(b"text", b"te\xff\xfe")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"t\.parquet"):
            list(read_rows(path, ["text"], 0, 1 << 20))


def test_a_text_that_the_dictionary_does_not_have_is_damage(tmp_path: Path) -> None:
    """Whatever byte changes, there are rows of texts or an error that names the file."""
    path, messages = _table(tmp_path / "t.parquet", [b"one", b"two", b"one", b"three"] * 5), ""
    data = path.read_bytes()
    for at in range(100):  # the dictionary, and what is looked up in it
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            texts = [text for _, rows, _, _ in read_rows(path, ["text"], 0, 1) for (text,) in rows]
            assert all(isinstance(text, str | bytes) for text in texts)
        except DataError as error:
            messages += str(error)
    assert "refers to a text outside the dictionary of its column" in messages


def test_a_file_that_is_gone_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"t\.parquet does not exist"):
        list(read_rows(tmp_path / "t.parquet", ["text"], 0, 1 << 20))


def test_a_missing_column_is_answered_with_the_option_of_the_command(tmp_path: Path) -> None:
    path = _table(tmp_path / "t.parquet", [b"one"], name="content")
    with pytest.raises(DataError, match=r"has no column 'text', only content\. Name one with --key\.$"):
        list(read_rows(path, ["text"], 0, 1 << 20))
    with pytest.raises(DataError, match=r"only content\. Name one with data\.text_key=KEY\.$"):
        estimate_text_bytes(find_sources([path]), "text", "data.text_key=KEY")
