"""Files are found in a fixed order, their kind follows from their names, and none is read twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_tools.read.find_input_files import find_sources, resolve_input, skipped_files
from lmtrain.errors import DataError, MissingInputError, UsageError


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
        (["b/5.md"], UsageError, r"has no readable suffix: \.txt"),
        ([], UsageError, "No input"),
        (["c*.txt"], MissingInputError, "does not exist"),
        (["empty"], MissingInputError, "holds no file with a readable suffix"),
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


@pytest.mark.parametrize(
    ("said", "kind", "codec"),
    [(None, "jsonl", ""), ("txt", "text", ""), ("jsonl.gz", "jsonl", "gz"), (".txt.zst", "text", "zst")],
)
def test_the_format_of_standard_input_is_chosen_by_option(said: str | None, kind: str, codec: str) -> None:
    given = resolve_input("-", said)
    assert not isinstance(given, str)
    assert (given.kind, given.codec, given.streamed) == (kind, codec, True)
    assert find_sources([given]) == [given]


def test_a_format_applies_to_files_with_an_unknown_suffix(folder: Path) -> None:
    given = resolve_input(str(folder / "b/5.md"), "txt")
    assert not isinstance(given, str)
    assert (given.kind, given.num_bytes) == ("text", 2)
    for name in ("a.txt", "b", "*.txt"):
        assert resolve_input(str(folder / name), "jsonl") == str(folder / name)


@pytest.mark.parametrize(("name", "said"), [("md", "the format is unknown"), ("parquet", "is read from its end")])
def test_an_unknown_format_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve_input("-", name)


def test_skipped_files_of_folders_and_globs_are_listed(folder: Path) -> None:
    (folder / "b/notes.pdf").write_text("")
    skipped = skipped_files([folder, folder / "b/*", folder / "a.txt", "-"])
    assert [str(path.relative_to(folder)) for path in skipped] == ["b/5.md", "b/notes.pdf", "b/5.md", "b/notes.pdf"]


@pytest.mark.parametrize("given", ["b/link.jsonl", "b", "b/*.jsonl"])
def test_a_link_to_nowhere_is_named_wherever_it_is_met(folder: Path, given: str) -> None:
    (folder / "b/link.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(MissingInputError, match=r"link\.jsonl is a link to gone\.jsonl, which does not exist"):
        names(folder, given)
    (folder / "b/link.jsonl").unlink()
    (folder / "b/link.jsonl").symlink_to("link.jsonl")
    with pytest.raises(DataError, match=r"link\.jsonl is part of a cycle of links"):
        names(folder, given)


def test_links_to_folders_are_listed_and_not_entered(folder: Path) -> None:
    (folder / "b/round").symlink_to(folder)
    assert names(folder, "b") == ["b/1.jsonl", "b/2.txt"]
    assert folder / "b/round" in skipped_files([folder])
    with pytest.raises(UsageError, match=r"more than once: it is .*/b/1\.jsonl"):
        names(folder, "**/*.jsonl")


@pytest.mark.parametrize("given", ["b/pipe.jsonl", "b", "b/pipe*"])
def test_a_pipe_is_refused_without_waiting_for_it(folder: Path, given: str) -> None:
    os.mkfifo(folder / "b/pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl is a pipe or a device.*give - instead"):
        names(folder, given)
    os.mkfifo(folder / "pipe")
    with pytest.raises(DataError, match="is a pipe or a device"):
        find_sources([resolve_input(str(folder / "pipe"), "jsonl")])
