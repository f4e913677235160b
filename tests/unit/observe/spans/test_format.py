from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from lmtrain.errors import DataError, MissingInputError
from lmtrain.observe.spans.span_file import (
    COUNTER,
    COUNTER_AT,
    HEADER_BYTES,
    RECORD,
    SPAN,
    Axis,
    Flag,
    Header,
    Kind,
    read_spans,
    record_position,
    span_file_name,
    write_name,
)  # fmt: skip


def header(capacity: int = 8) -> Header:
    return Header(
        rank=3, world_size=4, coordinate=(1, 0, 0, 1), sizes=(2, 1, 1, 1, 2), host="node7", pid=42, start=2,
        wall_ns=10**18, monotonic_ns=10**12, capacity=capacity, schedule="1f1b", num_microbatches=6,
    )  # fmt: skip


def write_record(memory: bytearray, number: int, capacity: int, values: tuple[int, ...]) -> None:
    at, lap = record_position(number, capacity)
    RECORD.pack_into(memory, at, *values, lap)
    COUNTER.pack_into(memory, COUNTER_AT, number + 1)


def values(begin_ns: int, end_ns: int, number: int = 0, name: int = 0, kind: int = Kind.SEND) -> tuple[int, ...]:
    return (begin_ns, end_ns, 4096, 11, number, 5, 2, 1, name, kind, Axis.PP, Flag.EARLY)


def written(path: Path, count: int, capacity: int = 8) -> Path:
    memory = bytearray(header(capacity).pack() + bytes(capacity * SPAN.itemsize))
    write_name(memory, 1, "a sum")
    for number in range(count):
        write_record(memory, number, capacity, values(100 * number, 100 * number + 50, number, number % 2))
    path.write_bytes(memory)
    return path


def test_what_is_packed_is_what_is_read() -> None:
    assert RECORD.size == SPAN.itemsize == 48


def test_a_file_tells_what_was_written(tmp_path: Path) -> None:
    path = written(tmp_path / span_file_name(3, 2), 3)
    found = read_spans(path)
    told = (found.header.rank, found.header.host, found.header.coordinate, found.header.sizes, found.header.schedule)
    assert told == (3, "node7", (1, 0, 0, 1), (2, 1, 1, 1, 2), "1f1b")
    assert (found.header.start, found.header.num_microbatches, found.header.monotonic_ns) == (2, 6, 10**12)
    assert [found.header.names[int(span["name"])] for span in found.spans] == ["", "a sum", ""]
    assert found.spans[1].tolist() == (100, 150, 4096, 11, 1, 5, 2, 1, 1, Kind.SEND, Axis.PP, Flag.EARLY, 1)


def test_a_span_stands_before_those_within_it(tmp_path: Path) -> None:
    memory = bytearray(header().pack() + bytes(8 * SPAN.itemsize))
    for number, (begin_ns, end_ns) in enumerate([(10, 20), (40, 50), (10, 60)]):
        write_record(memory, number, 8, values(begin_ns, end_ns))
    (tmp_path / "x").write_bytes(memory)
    spans = read_spans(tmp_path / "x").spans
    assert list(zip(spans["begin_ns"], spans["end_ns"], strict=True)) == [(10, 60), (10, 20), (40, 50)]


@pytest.mark.parametrize(("count", "first"), [(7, 0), (8, 1), (9, 2), (2053, 2046)])
def test_a_full_ring_holds_the_newest(tmp_path: Path, count: int, first: int) -> None:
    """The oldest one is left out: the process may have been killed while it wrote in its place."""
    numbers = read_spans(written(tmp_path / "x", count)).spans["number"]
    assert numbers.tolist() == list(range(first, count))


def test_names_of_files() -> None:
    assert (span_file_name(0, 0), span_file_name(12, 3)) == ("rank-00000.spans", "rank-00012.3.spans")


def test_a_file_may_be_shorter_than_its_ring(tmp_path: Path) -> None:
    path = written(tmp_path / "x", 3)
    path.write_bytes(path.read_bytes()[: HEADER_BYTES + 3 * SPAN.itemsize])
    assert len(read_spans(path).spans) == 3


def changed(path: Path, at: int, data: bytes) -> Path:
    content = bytearray(written(path, 3).read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("at", "data", "says"),
    [
        (0, b"x", "does not begin with"),
        (8, b"\2", "has trace format 2, but"),
        (12, b"\4", "checksum is wrong"),
        (28, b"\7", "checksum is wrong"),
        (512, struct.pack("<Q", 4), "1 of its 4 records are not in the order in which a run writes them"),
        (520, struct.pack("<I", 1), "1 of its 3 records have a name that the header lacks"),
        (520, struct.pack("<I", 65), "65 names"),
        (HEADER_BYTES, struct.pack("<q", 51), "end before they begin"),
        (HEADER_BYTES + 44, b"\x50", "an unknown kind"),
        (HEADER_BYTES + 45, b"\x50", "an unknown kind, axis"),
        (HEADER_BYTES + 36, struct.pack("<i", 4), "peer rank that does not exist"),
    ],
)
def test_damage_is_refused_in_words(tmp_path: Path, at: int, data: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_spans(changed(tmp_path / "x", at, data))


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x", 3)
    whole = path.read_bytes()
    for size in (0, 100, HEADER_BYTES - 1, HEADER_BYTES + 1, HEADER_BYTES + 3 * SPAN.itemsize - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError):
            read_spans(path)
    with pytest.raises(MissingInputError):
        read_spans(tmp_path / "nothing")


def test_whatever_byte_is_changed_it_is_refused_or_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x", 3)
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for at in [*range(0, 200, 9), *range(512, 530), *range(HEADER_BYTES, HEADER_BYTES + 3 * SPAN.itemsize, 5)]:
            os.pwrite(file.fileno(), bytes([whole[at] ^ 0xFF]), at)
            with suppress(DataError):
                assert len(read_spans(path).spans) <= 3
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    assert len(read_spans(path).spans) == 3
