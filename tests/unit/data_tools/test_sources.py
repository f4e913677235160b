"""Files are found in a fixed order, cut anywhere without losing a line, and bad lines are named by line and byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.sources import Slice, Texts, cut, find_sources, read_texts
from lmtrain.errors import DataError, MissingInputError, UsageError


def read(path: Path, slice_bytes: int = 1 << 20) -> list[str]:
    pieces = [piece for portion in cut(find_sources([path]), slice_bytes) for piece in portion]
    return [text for piece in pieces for text in read_texts(piece, "text")]


def test_folders_files_and_globs(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.jsonl", "b/.hidden/3.txt", "b/.4.txt", "b/5.md", "a.txt", "b[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")

    def names(*inputs: str) -> list[str]:
        return [str(s.path.relative_to(tmp_path)) for s in find_sources([tmp_path / name for name in inputs])]

    assert names("b") == ["b/1.jsonl", "b/2.txt"]
    assert names("b/2.txt", "a.txt") == ["b/2.txt", "a.txt"]
    assert names("*.txt") == ["a.txt", "b[1].txt"]
    assert names("b[1].txt") == ["b[1].txt"]
    assert names("**/*.jsonl") == ["b/1.jsonl"]
    with pytest.raises(UsageError, match="more than once"):
        names("a.txt", "*.txt")
    with pytest.raises(UsageError, match=r"neither \.txt nor \.jsonl"):
        names("b/5.md")
    with pytest.raises(UsageError, match="No input"):
        names()
    with pytest.raises(MissingInputError, match="does not exist"):
        names("c*")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingInputError, match="holds no"):
        names("empty")


@given(st.lists(st.text(alphabet="ab\u2028\u0085\r\x0bé", max_size=8), max_size=8), st.integers(1, 40), st.booleans())
def test_cut_anywhere_every_line_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], slice_bytes: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes(("\n".join(lines) + ("\n" if ends and lines else "")).encode())
    assert read(path, slice_bytes) == texts


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert read(path, slice_bytes=2) == ["one\r\ntwo\n"]


def test_lines_that_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first, second = b'\xef\xbb\xbf{"text": "a"}\r\n', b'{"n": {"text": 1}, "text": "b\\u2028\\ud83d\\ude00"}\n'
    path.write_bytes(first + b"\n  \n" + second + b'{"text": ""}')
    for slice_bytes in (1, 5, 1000):
        assert read(path, slice_bytes) == ["a", "b\u2028😀", ""]


GOOD = '{"text": "é"}\n'.encode()
BAD = [
    (b'{"text": "a"', 12, "not valid JSON"),
    (b"nonsense", 0, "not valid JSON"),
    (b'{"text": "a"} x', 14, "not valid JSON"),
    (b'{"n": NaN, "text": "a"}', 0, "NaN is no JSON"),
    (b'{"n": ' + b"9" * 5000 + b', "text": "a"}', 0, "not valid JSON"),
    (b'{"n": ' + b"[" * 100_000, 0, "not valid JSON"),
    (b'["text"]', 0, "not a JSON object"),
    (b'"text"', 0, "not a JSON object"),
    (b'{"body": "a"}', 0, "no key 'text'"),
    (b'{"text": "a", "text": "b"}', 0, "stands twice"),
    (b'{"text": null}', 0, "is not text"),
    (b'{"text": ["a"]}', 0, "is not text"),
    (b'{"text": {"text": "a"}}', 0, "is not text"),
    (b'{"text": "\\ud800"}', 0, "lone surrogate"),
    (b'{"text": "a\xff"}', 11, "invalid UTF-8"),
    (b'{"text": "\xed\xa0\x80"}', 10, "invalid UTF-8"),
]


@pytest.mark.parametrize(("line", "at", "cause"), BAD)
@pytest.mark.parametrize("last", [True, False])
def test_bad_lines_are_named(tmp_path: Path, line: bytes, at: int, cause: str, last: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 3 + line + (b"" if last else b"\n" + GOOD))
    for slice_bytes in (7, 1 << 20):
        with pytest.raises(DataError, match=cause) as caught:
            read(path, slice_bytes)
        assert str(caught.value).startswith(f"{path}:4 (byte {3 * len(GOOD) + at}): ")


def test_a_bad_text_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo \xff")
    with pytest.raises(DataError, match=r"a\.txt:2 \(byte 8\): invalid UTF-8"):
        read(path)


def test_portions_gather_small_files_and_cut_large_ones(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x" * 10)
    (tmp_path / "large.jsonl").write_text("y" * 45)
    portions = list(cut(find_sources([tmp_path]), 20))
    assert [[(p.path.name, p.start, p.stop) for p in portion] for portion in portions] == [
        [("0.txt", 0, 10), ("1.txt", 0, 10)],
        [("2.txt", 0, 10), ("3.txt", 0, 10)],
        [("4.txt", 0, 10), ("large.jsonl", 0, 20)],
        [("large.jsonl", 20, 40)],
        [("large.jsonl", 40, 45)],
    ]
    assert list(read_texts(Slice(tmp_path / "0.txt", 0, 10), "text")) == ["x" * 10]


def test_texts_can_be_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD * 2)
    texts = Texts(find_sources([tmp_path]), "text")
    assert list(texts) == list(texts) == ["é", "é"]
