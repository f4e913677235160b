"""Files are found in a fixed order, their kind follows from their names, and none is read twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_tools.read.find_input_files import TextSuffixes, find_sources, resolve_input
from lmtrain.errors import DataError, MissingInputError, UsageError, split_ways


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
        (["c*.txt"], MissingInputError, "matches no file"),
        (["c.txt"], MissingInputError, "does not exist"),
        (["empty"], MissingInputError, "holds no file with a readable suffix"),
    ],
)
def test_what_is_refused(folder: Path, inputs: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        names(folder, *inputs)


def test_files_that_are_no_text_and_lists_are_refused_with_what_to_do(folder: Path) -> None:
    for name in ("table.csv", "train.bin"):
        (folder / name).write_bytes(b"\xff\0")
    with pytest.raises(UsageError, match=r"table\.csv is a table in CSV, which is not read"):
        names(folder, "table.csv")
    for format_ in (None, "txt"):
        with pytest.raises(UsageError, match="may be bare tokens"):
            find_sources([resolve_input(str(folder / "train.bin"), format_)])
    with pytest.raises(UsageError, match=r"is several paths in one word\. Write .*a\.txt .*2\.txt"):
        find_sources([f"{folder}/a.txt,{folder}/b/2.txt"])


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


def test_files_that_are_left_out_are_counted_with_what_to_type(folder: Path) -> None:
    inputs: list[str | Path] = [folder, folder / "b/*", folder / "a.txt", "-"]
    said = split_ways(TextSuffixes().left_out(inputs))[0]
    assert said == "1 file left out (.md). Add --suffix .md to read it as text."
    (folder / "b/notes.pdf").write_bytes(b"%PDF\0")
    (folder / "b/6.md").write_text("six")
    (folder / "b/LICENSE").write_text("free")
    (folder / "c/code.py.gz").write_bytes(b"\x1f\x8b")
    said = split_ways(TextSuffixes().left_out(inputs))[0]
    assert said == (
        "5 files left out (.md, without a suffix, .pdf, .py.gz). Add --suffix .md to read them as text."
    )
    assert TextSuffixes((".md",)).left_out(inputs).startswith("3 files left out (without a suffix, .pdf, .py.gz). Fold")
    settings = TextSuffixes((".gz",), lambda each: f"[{','.join(each)}]", types_all=True)
    assert "Add [.gz,.md] to read them as text." in split_ways(settings.left_out(inputs))[0]
    assert TextSuffixes().left_out([folder / "c/x.parquet", "-"]) == ""


@pytest.mark.parametrize(
    ("inputs", "suffixes", "found"),
    [
        (["b"], [".md"], ["b/1.jsonl", "b/2.txt", "b/5.md"]),
        (["b/*.md"], [".md"], ["b/5.md"]),
        (["b/5.md", "a.txt"], [".md"], ["b/5.md", "a.txt"]),
        (["e", "a.txt"], [".md", ".py.gz"], ["e/1.py.gz", "e/2.md", "a.txt"]),
    ],
)
def test_files_with_further_suffixes_are_text(
    folder: Path, inputs: list[str], suffixes: list[str], found: list[str]
) -> None:
    (folder / "e").mkdir()
    for name in ("1.py.gz", "2.md", "3.py", "4.md.bak"):
        (folder / "e" / name).write_text("")
    sources = find_sources(TextSuffixes(tuple(suffixes)).resolve([folder / name for name in inputs]), "line")
    assert [str(source.path.relative_to(folder)) for source in sources] == found
    for source in sources:
        if source.path.name.endswith(tuple(suffixes)):
            assert (source.kind, source.codec) == ("lines", "gz" if source.path.suffix == ".gz" else "")


@pytest.mark.parametrize(
    ("inputs", "suffixes", "error", "said"),
    [
        (["b"], ["md"], UsageError, r"--suffix md names no suffix, .* Write --suffix \.md\.$"),
        (["b"], ["*.md"], UsageError, r"Write --suffix \.md\.$"),
        (["b"], ["."], UsageError, r"Give one such as \.py\.$"),
        (["b"], [".jsonl.gz"], UsageError, "suffix .jsonl.gz are read anyway"),
        (["b"], [".md", ".rs"], UsageError, r"--suffix \.rs has no effect: no input file has this suffix"),
        (["e"], [], MissingInputError, r"holds no file with a readable .* 1 file left out \(\.rs\)\. Add --suff"),
        (["e/*.rs"], [], MissingInputError, r"matches no file with a readable .* Add --suffix \.rs to read it as text"),
        (["e/*.py"], [], MissingInputError, r"e/\*\.py matches no file\. Give a pattern"),
    ],
)
def test_suffixes_that_are_refused(
    folder: Path, inputs: list[str], suffixes: list[str], error: type[Exception], said: str
) -> None:
    (folder / "e").mkdir()
    (folder / "e/1.rs").write_text("fn")
    with pytest.raises(error, match=said):
        TextSuffixes(tuple(suffixes)).resolve([folder / name for name in inputs])


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
    assert "2 files left out (.md, links to folders)" in TextSuffixes().left_out([folder / "b"])
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


def test_a_folder_of_files_that_are_no_text_says_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").touch()
    with pytest.raises(MissingInputError, match=r"left out \(.pdf\). \S+a.pdf is a PDF, which is not read. `pdf"):
        TextSuffixes(()).resolve([tmp_path])
