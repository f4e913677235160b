"""A part has its range of the input and its own output names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.read.cut_files_into_chunks import TaskPart
from lmtrain.errors import UsageError


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 9))
def test_every_byte_and_every_source_is_of_one_part(sizes: list[int], count: int) -> None:
    parts = [list(TaskPart(number, count).spans(sizes)) for number in range(count)]
    for number, size in enumerate(sizes):
        spans = [part[number] for part in parts]
        assert [at for span in spans for at in range(span.start, span.stop)] == list(range(size))
        assert [span.is_whole for span in spans].count(True) == 1
        assert all(span.start == 0 for span in spans if span.is_whole)


@pytest.mark.parametrize("text", ["3/3", "1", "-1/3", "a/b", "0/0"])
def test_a_wrong_part_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a part"):
        TaskPart.parse(text)


def test_a_part_has_a_name_of_its_own() -> None:
    assert TaskPart.parse("3/16").output_path(Path("a/b.jsonl")) == Path("a/b.part-00003-of-00016.jsonl")
    assert TaskPart.parse("0/1").output_path(Path("a/b.jsonl")) == Path("a/b.jsonl")
