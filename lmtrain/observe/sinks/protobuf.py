"""Protocol buffers as bytes, by hand: a field's number and kind, then its value. No schema, no package.

Called by whoever writes another program's records: event files for TensorBoard.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # wire types


def key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def field_varint(number: int, value: int) -> bytes:
    return key(number, VARINT) + _varint(value)


def field_bytes(number: int, data: bytes) -> bytes:
    return key(number, BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; the high bit says that more follow. A negative int64 takes ten bytes."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field_double(number: int, value: float) -> bytes:
    return key(number, DOUBLE) + struct.pack("<d", value)


def field_doubles(number: int, values: Iterable[float]) -> bytes:
    """A packed list."""
    return field_bytes(number, b"".join(struct.pack("<d", value) for value in values))


def field_text(number: int, text: str) -> bytes:
    return field_bytes(number, text.encode())
