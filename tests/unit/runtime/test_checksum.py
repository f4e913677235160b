"""CRC-32C as published, wherever it is cut, by the compiled helper and by its twin."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.runtime import compiled_helpers
from lmtrain.runtime.files.crc32c import crc32c, crc32c_numpy


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_crc32c_of_published_vectors(data: bytes, expected: int) -> None:
    assert crc32c_numpy(data) == expected
    assert crc32c(data) == expected


@given(data=st.binary(max_size=300), cut=st.integers(0, 300))
def test_crc32c_continues_where_it_stopped(data: bytes, cut: int) -> None:
    assert crc32c_numpy(data[cut:], crc32c_numpy(data[:cut])) == crc32c_numpy(data)


def test_it_continues_also_without_the_compiled_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_helpers, "lib", None)
    assert crc32c(b"56789", crc32c(b"1234")) == 0xE3069283


@pytest.mark.skipif(getattr(compiled_helpers.lib, "crc32c", None) is None, reason="the compiled helper is not built")
@given(data=st.binary(max_size=300), start=st.integers(0, 2**32 - 1))
def test_the_compiled_crc32c_equals_its_twin(data: bytes, start: int) -> None:
    assert crc32c(data, start) == crc32c_numpy(data, start)


@pytest.mark.parametrize("size", [511, 512, 16_367, 16_368, 16_369, 32_736, 100_003, (1 << 20) + 7])
def test_long_stretches_are_what_their_parts_are(size: int) -> None:
    """Both take long data in several lanes at once."""
    data = random.Random(size).randbytes(size)
    in_parts = 0
    for at in range(0, size, 500):
        in_parts = crc32c_numpy(data[at : at + 500], in_parts)
    assert crc32c_numpy(data, 7) == crc32c(data, 7)
    assert crc32c_numpy(data) == in_parts
