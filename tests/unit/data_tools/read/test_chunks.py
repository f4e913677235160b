"""However the sources are cut, every line is read once, whole and in order, and cutting goes on where it stopped."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.read import compressed_and_parquet_readers
from data_tools.read.cut_files_into_chunks import (
    START,
    MemoryBudget,
    Portion,
    ReadPosition,
    SizeLimits,
    cut_portions,
    read_lines,
)
from data_tools.read.find_input_files import TextSplit, find_sources
from data_tools.read.parse_chunks_and_bad_lines import SourceTexts, read_content
from lmtrain.errors import DataError

UNBOUNDED = 2**62


def portions(
    path: Path, limits: SizeLimits, place: ReadPosition = START, budget: MemoryBudget | None = None,
    split: TextSplit = "file",
) -> list[Portion]:  # fmt: skip
    return list(cut_portions(find_sources([path], split), place, limits, ("text",), budget or MemoryBudget(UNBOUNDED)))


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
    monkeypatch.setattr("data_tools.read.cut_files_into_chunks._BEYOND_BYTES", 4)
    monkeypatch.setattr("data_tools.read.cut_files_into_chunks._SCAN_BYTES", 16)
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


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from(["a", "b\nc", "é", " d", "\ufeffe", "f\r"]), max_size=8), st.integers(1, 12),
    st.sampled_from(["\n\n", "\n\n\n", "\r\n\r\n", "\n \t\n"]), st.sampled_from([1, 2, 3, 1 << 20]), st.booleans(),
)  # fmt: skip
def test_paragraphs_and_lines_are_documents_however_the_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], slice_bytes: int, gap: str, step: int, packed: bool
) -> None:
    data = gap.join(pieces).encode()
    path = tmp_path_factory.mktemp("split") / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(data) if packed else data)
    text = data.decode("utf-8-sig")
    documents = {
        "blank-line": [part.strip("\r\n") for part in re.split(r"(?:\n[ \t]*\r?)+\n", text)],
        "line": [part.strip("\r\n") for part in text.split("\n")],
    }
    for split, wanted in documents.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compressed_and_parquet_readers, "STEP_BYTES", step)
            found = portions(path, SizeLimits(slice_bytes=slice_bytes), split=split)  # type: ignore[arg-type]
        chunks = [chunk for portion in found for chunk in portion.chunks]
        contents = [read_content(chunk, SizeLimits(), lambda: None)[0] for chunk in chunks]
        texts_found = [text for content in contents for _, text in content.texts(0, "text")]
        assert texts_found == [w for w in wanted if w.strip()]
        places = [content.position(item) for content in contents for item in content.items()]
        starts = [data[at:].decode(errors="replace") for at in places]
        assert all(start.startswith(w) for start, w in zip(starts, filter(str.strip, wanted), strict=True))


def test_a_wrong_byte_of_a_paragraph_is_found_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\n\nthree\nfo\xffur\n\nfive\n")
    for limits in (SizeLimits(), SizeLimits(slice_bytes=6)):
        texts = SourceTexts(find_sources([tmp_path / "a.txt"], "blank-line"), "text", limits)
        with pytest.raises(DataError, match=r"a.txt:6 \(byte 18\): invalid UTF-8"):
            list(texts)


def test_a_paragraph_that_is_too_long_is_left_out_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\n" + b"x" * 50 + b"\n\nthree")
    for step in (1, 4, 1 << 20):
        limits = SizeLimits(slice_bytes=8, max_doc_bytes=12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compressed_and_parquet_readers, "STEP_BYTES", step)
            chunks = [chunk for p in portions(tmp_path / "a.txt", limits, split="blank-line") for chunk in p.chunks]
        read = [read_content(chunk, limits, lambda: None) for chunk in chunks]
        assert [text for content, _ in read for _, text in content.texts(0, "text")] == ["one", "three"]
        assert [bad.offset for _, problems in read for bad in problems] == [5]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_resumed_read_counts_only_what_it_reads_of_the_file(tmp_path: Path, kind: str) -> None:
    """The compressed bytes that an earlier run counted are not counted again."""
    path, chance = tmp_path / f"a.{kind}", random.Random(0)
    rows = [{"text": chance.randbytes(1000).hex()} for _ in range(300)]
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    else:
        data = "\n".join(map(json.dumps, rows)).encode()
        path.write_bytes(gzip.compress(data) if kind == "jsonl.gz" else data)
    limits = SizeLimits(slice_bytes=20_000)
    chunks = [chunk for portion in portions(path, limits) for chunk in portion.chunks]
    assert len(chunks) > 4
    counted = 0
    for chunk in chunks:
        counted += chunk.num_disk_bytes
        rest = [chunk.num_disk_bytes for portion in portions(path, limits, chunk.next) for chunk in portion.chunks]
        assert counted + sum(rest) == pytest.approx(path.stat().st_size, abs=1)
