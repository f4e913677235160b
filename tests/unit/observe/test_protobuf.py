"""Bytes as protocol buffers have them; the numbers are those of its own documentation."""

from __future__ import annotations

from lmtrain.observe.sinks.tensorboard import field_bytes, field_double, field_doubles, field_text, field_varint


def test_the_examples_of_the_encoding_guide() -> None:
    assert field_varint(1, 150) == bytes.fromhex("089601")
    assert field_text(2, "testing") == bytes.fromhex("120774657374696e67")
    assert field_bytes(3, field_varint(1, 150)) == bytes.fromhex("1a03089601")
    assert field_varint(1, -2) == bytes.fromhex("08feffffffffffffffff01")


def test_doubles() -> None:
    assert field_double(1, 1.0) == b"\x09" + b"\0" * 6 + b"\xf0?"
    assert field_doubles(6, [1.0, 1.0]) == b"\x32\x10" + 2 * (b"\0" * 6 + b"\xf0?")
