"""Files are found in a fixed order, known by their names, and given once."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_tools.read.sources import find_sources
from lmtrain.errors import MissingInputError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b/2.txt", "b/1.jsonl", "b/.hidden/3.txt", "b/.4.txt", "b/5.md", "a.txt", "b[1].txt", "c/x.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "empty").mkdir()
    return tmp_path


def names(folder: Path, *inputs: str) -> list[str]:
    return [str(s.path.relative_to(folder)) for s in find_sources([folder / name for name in inputs])]


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        (["b"], ["b/1.jsonl", "b/2.txt"]),
        (["b/2.txt", "a.txt"], ["b/2.txt", "a.txt"]),
        (["*.txt"], ["a.txt", "b[1].txt"]),
        (["b[1].txt"], ["b[1].txt"]),
        (["**/*.jsonl", "c"], ["b/1.jsonl", "c/x.parquet"]),
    ],
)
def test_folders_files_and_globs(folder: Path, inputs: list[str], found: list[str]) -> None:
    assert names(folder, *inputs) == found


@pytest.mark.parametrize(
    ("inputs", "error", "said"),
    [
        (["a.txt", "*.txt"], UsageError, "more than once"),
        (["b/5.md"], UsageError, r"is none of \.txt"),
        ([], UsageError, "No input"),
        (["c*.txt"], MissingInputError, "does not exist"),
        (["empty"], MissingInputError, "holds none of"),
    ],
)
def test_what_is_refused(folder: Path, inputs: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        names(folder, *inputs)


@pytest.mark.parametrize(
    ("name", "kind", "codec"),
    [
        ("a.jsonl", "jsonl", ""),
        ("a.jsonl.gz", "jsonl", "gz"),
        ("c4-train.00000-of-01024.json.gz", "jsonl", "gz"),
        ("a.jsonl.zst", "jsonl", "zst"),
        ("a.zst", "jsonl", "zst"),
        ("a.txt", "text", ""),
        ("a.txt.gz", "text", "gz"),
        ("a.txt.zst", "text", "zst"),
        ("a.jsonl.bz2", "jsonl", "bz2"),
        ("a.json.xz", "jsonl", "xz"),
        ("a.txt.xz", "text", "xz"),
        ("a.parquet", "parquet", ""),
    ],
)
def test_a_name_says_what_a_file_holds(tmp_path: Path, name: str, kind: str, codec: str) -> None:
    (tmp_path / name).write_bytes(b"12345")
    (source,) = find_sources([tmp_path / name])
    assert (source.kind, source.codec, source.streamed, source.num_bytes) == (kind, codec, bool(codec), 5)


def test_standard_input() -> None:
    (source,) = find_sources(["-"])
    assert (source.kind, source.streamed) == ("jsonl", True)
