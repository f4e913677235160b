"""However the sources are cut, every line is read once, whole and in order, and cutting goes on where it stopped."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.read.find_input_files import find_sources
from data_tools.read.input_chunks import (
    START,
    MemoryBudget,
    Portion,
    ReadPosition,
    SizeLimits,
    cut_portions,
    read_lines,
)
from data_tools.read.parse_documents import read_content

UNBOUNDED = 2**62


def portions(
    path: Path, limits: SizeLimits, place: ReadPosition = START, budget: MemoryBudget | None = None
) -> list[Portion]:
    return list(cut_portions(find_sources([path]), place, limits, ("text",), budget or MemoryBudget(UNBOUNDED)))


def texts(path: Path, limits: SizeLimits, place: ReadPosition = START) -> list[str]:
    found = []
    for portion in portions(path, limits, place):
        for chunk in portion.chunks:
            documents, bad = read_content(chunk, limits, lambda: None)
            assert not bad
            found += [str(text) for _, text in documents.texts(0, "text")]
    return found


lines = st.lists(st.text(alphabet="ab\u2028\u0085\r\x0bé", max_size=8), max_size=8)


@settings(deadline=None, max_examples=25)
@given(lines, st.integers(1, 40), st.booleans(), st.booleans())
def test_every_line_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, texts_in: list[str], slice_bytes: int, ends: bool, packed: bool
) -> None:
    body = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts_in)
    data = (body + ("\n" if ends and texts_in else "")).encode()
    path = tmp_path_factory.mktemp("cut") / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(data) if packed else data)
    limits = SizeLimits(slice_bytes=slice_bytes)
    assert texts(path, limits) == texts_in
    cuts = portions(path, limits)
    for number, portion in enumerate(cuts):  # and from every place where a portion ends
        before = [len(texts_of(p, limits)) for p in cuts[: number + 1]]
        assert texts(path, limits, portion.chunks[-1].next) == texts_in[sum(before) :]


def texts_of(portion: Portion, limits: SizeLimits) -> list[object]:
    return [
        text for chunk in portion.chunks for _, text in read_content(chunk, limits, lambda: None)[0].texts(0, "text")
    ]


def test_small_files_go_together_and_large_ones_are_cut(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x" * 10)
    (tmp_path / "large.jsonl").write_text("y" * 45)
    found = [[(p.path.name, p.start, p.stop) for p in portion.chunks] for portion in portions(tmp_path, SizeLimits(20))]
    assert found == [
        [("0.txt", 0, 10), ("1.txt", 0, 10)],
        [("2.txt", 0, 10), ("3.txt", 0, 10)],
        [("4.txt", 0, 10)],
        [("large.jsonl", 0, 20)],
        [("large.jsonl", 20, 40)],
        [("large.jsonl", 40, 45)],
    ]


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("start", range(0, 70, 7))
def test_lines_of_a_range(tmp_path: Path, start: int, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_tools.read.input_chunks._BEYOND_BYTES", 4)
    monkeypatch.setattr("data_tools.read.input_chunks._SCAN_BYTES", 16)
    path = tmp_path / "a.jsonl"
    data = b"first\n" + b"x" * 50 + b"\nlast"
    path.write_bytes(data)
    limits = SizeLimits(slice_bytes=7, max_doc_bytes=30 if long else 60)
    asked: list[bool] = []
    found = read_lines(path, start, start + 7, limits, lambda: asked.append(True))
    all_lines = [(0, b"first\n"), (6, b"x" * 50 + b"\n"), (57, b"last")]
    owned = [(at, line) for at, line in all_lines if start <= at < start + 7]
    kept = [line for at, line in owned if not (long and at == 6)]
    assert bytes(found.data) == b"".join(kept)
    assert found.long_at == (6 if long and start == 0 else None)
    assert asked == ([True] if start == 0 and not long else [])
    if kept:
        assert found.start == owned[0][0]


def test_content_in_memory_is_acquired_from_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "0123456789"}\n' * 5000))
    taken: list[int] = []

    class Asked(MemoryBudget):
        def acquire(self, num_bytes: int) -> None:
            taken.append(num_bytes)

    found = portions(path, SizeLimits(slice_bytes=1000), budget=Asked(0))
    assert sum(taken) == sum(portion.num_bytes for portion in found) == 5000 * 23
