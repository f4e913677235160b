"""Human sizes are read as people mean them and printed for a glance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain import units


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.parse_count, "300B", 300_000_000_000),
        (units.parse_count, "1.5M", 1_500_000),
        (units.parse_count, "1.1B", 1_100_000_000),
        (units.parse_count, "10_000", 10_000),
        (units.parse_count, " 2 k ", 2000),
        (units.parse_count, "2.56e6", 2_560_000),
        (units.parse_bytes, "80GiB", 80 << 30),
        (units.parse_bytes, "80gb", 80 * 10**9),
        (units.parse_bytes, "512", 512),
        (units.parse_bytes, "1PiB", 1 << 50),
        (units.parse_seconds, "12h", 43200.0),
        (units.parse_seconds, "1.5min", 90.0),
        (units.parse_seconds, "2d", 172800.0),
    ],
)
def test_sizes_are_read(read: Callable[[str], float], text: str, value: float) -> None:
    assert read(text) == value


@pytest.mark.parametrize("text", ["", "B", "12x", "-3", "1 2", "1GiB/s", "nan", "1.2.3", "0x10"])
@pytest.mark.parametrize("read", [units.parse_count, units.parse_bytes, units.parse_seconds])
def test_other_texts_are_refused_with_an_example(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as"):
        read(text)


@pytest.mark.parametrize("text", ["1.5", "0.5", "1.0005k"])
def test_a_part_of_one_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        units.parse_count(text)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (units.format_count, 12_345_678, "12.3M"),
        (units.format_count, 999, "999"),
        (units.format_count, 999_600, "1M"),
        (units.format_count, 300e9, "300B"),
        (units.format_count, 0, "0"),
        (units.format_bytes, 61 << 30, "61.0 GiB"),
        (units.format_bytes, 1023, "1023 B"),
        (units.format_seconds, 0.25, "0.2s"),
        (units.format_seconds, 59.97, "1m00s"),
        (units.format_seconds, 3725, "1h02m"),
        (units.format_seconds, 90061, "1d01h"),
    ],
)
def test_sizes_are_printed(write: Callable[[float], str], value: float, text: str) -> None:
    assert write(value) == text


@given(value=st.integers(0, 10**15))
def test_a_printed_count_reads_back_to_three_digits(value: int) -> None:
    assert units.parse_count(units.format_count(value)) == pytest.approx(value, rel=6e-3, abs=0.5)


def test_a_count_with_its_noun() -> None:
    assert [units.plural(count, "document") for count in (0, 1, 2)] == ["0 documents", "1 document", "2 documents"]
    assert units.plural(2000, "step", "2k") == "2k steps"
