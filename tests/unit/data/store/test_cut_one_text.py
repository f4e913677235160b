"""What is advised to one who has one document cuts that text, and is not what was done already."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lmtrain.data.store.cut_one_text import finer_split

PARAGRAPHS, LINES = ("blank-line", "paragraphs"), ("line", "lines")


@pytest.mark.parametrize(("text", "split", "expected"), [
    ("a\n\nb", "file", PARAGRAPHS), ("a\r\n \t\r\nb\n", "file", PARAGRAPHS), ("a\nb", "file", LINES),
    ("a\nb\n", "blank-line", LINES), ("a\nb", "line", None), ("\n\n a b \n\n", "file", None), ("", "file", None),
])  # fmt: skip
def test_the_coarsest_split_that_cuts_it(
    tmp_path: Path, text: str, split: str, expected: tuple[str, str] | None
) -> None:
    (tmp_path / "one.txt").write_bytes(text.encode())
    for name in (tmp_path / "one.txt", tmp_path, tmp_path / "*.txt"):
        assert finer_split([str(name)], split) == expected


def test_nothing_is_advised_for_several_files_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a\n\nb")
    (tmp_path / "two.txt").write_text("a\n\nb")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a\n\nb"))
    for names in (["one.txt", "two.txt"], ["a.txt.gz"], ["missing.txt"], [""]):
        assert finer_split([str(tmp_path / name) for name in names], "file") is None


def test_a_long_text_is_read_at_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a\n" + "\N{EURO SIGN}" * (1 << 19) + "\n\nb")
    assert finer_split([str(tmp_path / "one.txt")], "file") == LINES
