"""Line ends of other systems, which stay in a dataset's texts, are told with how to replace them."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_tools.read.find_input_files import TextSplit, find_sources
from data_tools.read.line_ends_of_other_systems import line_end_notices


@pytest.mark.parametrize(
    ("content", "split", "told"),
    [
        (b"one\r\ntwo\r\n", "file", ["tr -d '\\r'"]), (b"one\rtwo\r", "file", ["tr '\\r' '\\n'"]),
        (b"one\rtwo\r\n", "blank-line", ["tr -d '\\r'", "tr '\\r' '\\n'"]), (b"one\ntwo\n", "file", []),
        (b"one\r\ntwo\r\n", "line", []), (b"one\rtwo\r", "line", ["tr '\\r' '\\n'"]),
    ],
)  # fmt: skip
def test_each_kind_of_line_end(tmp_path: Path, content: bytes, split: TextSplit, told: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    notices = list(line_end_notices(find_sources([path], split)))
    assert [notice.partition("`")[2].partition(" < ")[0] for notice in notices] == told
    assert all(notice.startswith(f"1 text file ({path}) has line ends ") for notice in notices)


def test_lines_of_json_have_line_ends_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\r\n')
    assert list(line_end_notices(find_sources([tmp_path]))) == []
