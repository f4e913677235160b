"""Archives are read completely or are an error: truncation, damage and bombs are found, memory is bounded."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import zstandard

from data_tools.read.compressed_and_parquet_readers import (
    ALWAYS_ALLOWED_BYTES,
    STEP_BYTES,
    DamagedArchiveError,
    read_stream,
)
from tests.marks import wide

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "zst": zstandard.compress, "bz2": bz2.compress, "xz": lzma.compress
}  # fmt: skip
TEXT = random.Random(0).randbytes(300_000) + b"the same again\n" * 60_000
codecs = pytest.mark.parametrize("codec", PACK)


@cache
def packed_text(codec: str) -> bytes:
    return PACK[codec](TEXT)


def read(data: bytes, codec: str) -> bytes:
    return b"".join(read_stream(io.BytesIO(data), codec))


@codecs
def test_one_archive_and_several_in_a_row(codec: str) -> None:
    packed = packed_text(codec)
    assert read(packed, codec) == TEXT
    assert read(packed + PACK[codec](b"") + packed, codec) == TEXT + TEXT
    assert read(PACK[codec](b""), codec) == b""


def test_an_archive_without_a_stated_size_is_read() -> None:
    stream = zstandard.ZstdCompressor().compressobj()
    assert read(stream.compress(TEXT) + stream.flush(), "zst") == TEXT


def test_zeros_may_follow_a_gz() -> None:
    assert read(gzip.compress(b"x") + bytes(2 * STEP_BYTES), "gz") == b"x"


@pytest.mark.parametrize("codec", ["gz", "xz", *wide("bz2")])
def test_endless_zeros_after_an_archive_are_refused(codec: str, tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.write_bytes(PACK[codec](b"x"))
    os.truncate(path, 1 << 40)
    with path.open("rb") as file, pytest.raises(DamagedArchiveError, match="followed by too many zeros"):
        list(read_stream(file, codec))


@codecs
@pytest.mark.parametrize("share", [0, 1e-5, 0.3, 0.999, 1])
def test_a_cut_archive_is_no_short_one(codec: str, share: float) -> None:
    packed = packed_text(codec)
    with pytest.raises(DamagedArchiveError, match="cut short"):
        read(packed[: min(int(share * len(packed)), len(packed) - 1)], codec)


@codecs
def test_damage_is_found_and_what_came_before_is_not_lost(codec: str) -> None:
    packed = packed_text(codec)
    chunks = read_stream(io.BytesIO(packed + b"garbage behind it"), codec)
    found: list[bytes] = []
    with pytest.raises(DamagedArchiveError, match="damaged"):
        found.extend(chunks)
    assert b"".join(found) == TEXT
    flipped = bytearray(packed_text("gz"))
    flipped[-5] ^= 1  # in the checksum
    with pytest.raises(DamagedArchiveError, match="data check"):
        read(bytes(flipped), "gz")


@pytest.mark.parametrize("codec", ["gz", *wide(*sorted(PACK.keys() - {"gz"}))])
def test_a_bomb_is_found_early(codec: str) -> None:
    packed = PACK[codec](bytes(ALWAYS_ALLOWED_BYTES * 2)) * 50  # 6.4 GB
    num_bytes: list[int] = []
    tracemalloc.start()
    sizes = map(len, read_stream(io.BytesIO(packed), codec))
    with pytest.raises(DamagedArchiveError, match="more than the allowed 250 times"):
        num_bytes.extend(sizes)
    assert sum(num_bytes) <= ALWAYS_ALLOWED_BYTES
    assert tracemalloc.get_traced_memory()[1] < 3 * ALWAYS_ALLOWED_BYTES
    tracemalloc.stop()


@codecs
def test_thousands_of_empty_archives_take_no_longer_each(codec: str) -> None:
    def seconds(count: int) -> float:
        packed, began = PACK[codec](b"") * count, time.process_time()
        assert read(packed, codec) == b""
        return time.process_time() - began

    seconds(100)
    assert seconds(16_000) < 4 * 16 * max(seconds(1000), 0.002)


def test_a_zst_window_over_the_limit_is_refused() -> None:
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=30, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    with pytest.raises(DamagedArchiveError, match="memory"):
        read(stream.compress(TEXT) + stream.flush(), "zst")
