"""JSON lines by position: every line in exactly one part and block, bad ones named, compressed ones capped."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_tools.read.records import OFFSET_BITS, Part, Reading, cut, find_files, read_block
from lmtrain.errors import DataError, MissingInputError, UsageError
from tests.unit.data_tools.corpus_files import write_jsonl


def positions(files: list[Path], part: Part, block_bytes: int, reading: Reading | None = None) -> list[tuple[int, str]]:
    reading = reading or Reading()
    blocks = cut(files, part, reading, block_bytes)
    return [(at, document["text"]) for block in blocks for at, document in read_block(block, reading, lambda _: None)]


@given(
    lengths=st.lists(st.lists(st.integers(0, 60), max_size=12), min_size=1, max_size=4),
    count=st.integers(1, 7),
    block_bytes=st.integers(1, 200),
)
def test_every_line_is_in_one_part_whatever_the_parts_and_blocks(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], count: int, block_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    files = [
        write_jsonl(folder / f"{i}.jsonl", [{"text": f"{i}.{k} " + "ä" * length} for k, length in enumerate(some)])
        for i, some in enumerate(lengths)
    ]
    whole = positions(files, Part(), 1 << 20)
    in_parts = [item for i in range(count) for item in positions(files, Part(i, count), block_bytes)]
    assert in_parts == whole
    assert len(whole) == sum(map(len, lengths))
    assert [at for at, _ in whole] == sorted({at for at, _ in whole})


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress
}  # fmt: skip


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files_give_the_same_documents_to_one_part(tmp_path: Path, suffix: str) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i}" * 50} for i in range(100)])
    packed = tmp_path / f"a.jsonl{suffix}"
    packed.write_bytes(PACKERS[suffix](plain.read_bytes()))
    assert positions([packed], Part(), 300) == positions([plain], Part(), 1 << 20)
    assert [bool(positions([packed], Part(i, 3), 300)) for i in range(3)] == [True, False, False]


def test_a_position_names_the_file_and_the_byte(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / name, [{"text": "x"}, {"text": "y"}]) for name in ("a.jsonl", "b.jsonl")]
    found = [at for at, _ in positions(files, Part(), 1 << 20)]
    assert [(at >> OFFSET_BITS, at & ((1 << OFFSET_BITS) - 1)) for at in found] == [(0, 0), (0, 14), (1, 0), (1, 14)]


BAD = {
    "not valid JSON": b'{"text": "a"',
    "invalid UTF-8": b'{"text": "\xff"}',
    "not a JSON object": b'["text"]',
    "no text under the key 'text'": b'{"text": 5}',
    "a key stands twice": b'{"text": "a", "text": "b"}',
    "NaN is no JSON": b'{"text": "a", "n": NaN}',
    "a lone surrogate, which is no character": b'{"text": "\\ud800"}',
    "nests too deeply": b"[" * 100_000,
    "longer than 1.0 MiB": b'{"text": "' + b"a" * (1 << 20) + b'"}',
}


@pytest.mark.parametrize(("cause", "line"), BAD.items(), ids=BAD.keys())
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_line_stops_with_its_place_or_is_counted(tmp_path: Path, cause: str, line: bytes, suffix: str) -> None:
    content = b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n'
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError) as caught:
        positions([path], Part(), 1 << 20, Reading(max_doc_bytes=1 << 20))
    assert cause in str(caught.value)
    assert "(byte 19" in str(caught.value)
    assert (f"{path}:2" in str(caught.value)) == (not suffix)
    counts: Counter[str] = Counter()
    reading = Reading(on_error="skip", max_doc_bytes=1 << 20)
    blocks = cut([path], Part(), reading, 10_000)
    found = [d["text"] for block in blocks for _, d in read_block(block, reading, lambda c: counts.update([c]))]
    assert found == ["before", "after"]
    assert counts == {f"bad line: {cause}": 1}


def test_other_line_ends_marks_and_blank_lines_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b"}\r\n\n  \n{"text": "\\ud83d\\ude00"}'.encode())
    assert [text for _, text in positions([path], Part(), 1 << 20)] == ["a\u2028b", "\U0001f600"]


def test_a_bomb_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    packer = gzip.GzipFile(path, "wb", 9)
    for _ in range(80):
        packer.write(bytes(1 << 20))
    packer.close()
    with pytest.raises(DataError, match="unpacks to over"):
        positions([path], Part(), 1 << 20, Reading(on_error="skip"))


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_file_that_is_cut_short_is_damaged(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](b'{"text": "some text"}\n' * 100)[:-9])
    with pytest.raises(DataError, match="cut short or damaged"):
        positions([path], Part(), 1 << 20)


def test_files_are_found_in_order_and_once(tmp_path: Path) -> None:
    names = ["b.jsonl", "a.jsonl.gz", ".hidden.jsonl", "notes.txt", "deep/c.jsonl"]
    for name in names:
        write_jsonl(tmp_path / name, [])
    assert [path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path])] == [
        "a.jsonl.gz", "b.jsonl", "deep/c.jsonl"
    ]  # fmt: skip
    assert find_files([str(tmp_path / "*.jsonl")]) == [tmp_path / "b.jsonl"]
    with pytest.raises(UsageError, match="more than once"):
        find_files([tmp_path, tmp_path / "b.jsonl"])
    with pytest.raises(UsageError, match=r"notes\.txt is none of"):
        find_files([tmp_path / "notes.txt"])
    with pytest.raises(MissingInputError):
        find_files([tmp_path / "absent.jsonl"])
    with pytest.raises(UsageError, match="No input"):
        find_files([])


@pytest.mark.parametrize("text", ["3/3", "1", "-1/3", "a/b", "0/0"])
def test_a_wrong_part_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a part"):
        Part.parse(text)


def test_a_part_has_a_name_of_its_own() -> None:
    assert Part.parse("3/16").name(Path("a/b.jsonl")) == Path("a/b.part-00003-of-00016.jsonl")
    assert Part.parse("0/1").name(Path("a/b.jsonl")) == Path("a/b.jsonl")
