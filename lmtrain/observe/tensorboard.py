"""TensorBoard event files, written without TensorBoard: TFRecord framing around hand-made protobuf.

Called by the training loop beside `metrics.py`, which stays the truth. Knows nothing of training: a tag, a value
and a step go in. Read back in the tests by TensorBoard itself.

A record is: length (u64), masked CRC32C of the length (u32), data, masked CRC32C of the data (u32), all little endian.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from pathlib import Path

from lmtrain.observe.escaped import warn
from lmtrain.observe.growing_file import GrowingFile
from lmtrain.runtime.checksum import crc32c

_DOUBLE, _VARINT, _BYTES, _FLOAT = 1, 0, 2, 5  # protobuf wire types
_DT_STRING = 7
_SESSION_START = 1
_MOST = 3.4028234663852886e38  # because: a float of 4 bytes holds no more


class EventWriter:
    """The event file of an attempt that begins with `start_step` steps done; what earlier ones say beyond is purged."""

    def __init__(
        self, folder: Path, start_step: int, clock: Callable[[], float] = time.time, say: Callable[[str], None] = warn
    ) -> None:
        self._clock = clock
        # because: TensorBoard reads a folder's files in the order of their names, whatever the clocks say
        name = f"events.out.tfevents.{len(list(folder.glob('*tfevents*'))):06d}.lmtrain"
        version = self._event(_field_bytes(3, b"brain.Event:2"), step=0)
        began = self._event(_field_bytes(7, _field_varint(1, _SESSION_START)), step=start_step + 1)  # it forgets >=
        self._file = GrowingFile(folder / name, "values", say, head=version + began, new=True)

    def scalar(self, tag: str, value: float, step: int) -> None:
        value = math.copysign(math.inf, value) if abs(value) > _MOST else value
        self._summary(tag, _key(2, _FLOAT) + struct.pack("<f", value), step)

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Markdown for TensorBoard's text tab: a string tensor that belongs to the "text" plugin."""
        plugin = _field_bytes(1, _field_bytes(1, b"text"))
        shape = _field_bytes(2, _field_bytes(2, _field_varint(1, 1)))
        tensor = _field_varint(1, _DT_STRING) + shape + _field_bytes(8, text.encode())
        self._summary(tag, _field_bytes(9, plugin) + _field_bytes(8, tensor), step)

    def close(self) -> None:
        self._file.close()

    def _summary(self, tag: str, value: bytes, step: int) -> None:
        self._file.append(self._event(_field_bytes(5, _field_bytes(1, _field_bytes(1, tag.encode()) + value)), step))

    def _event(self, what: bytes, step: int) -> bytes:
        wall_time = _key(1, _DOUBLE) + struct.pack("<d", self._clock())
        return record(wall_time + _field_varint(2, step) + what)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))


def _masked_crc(data: bytes) -> int:
    """TFRecord stores a rotated checksum plus a constant, so that a checksum of checksums is not degenerate."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _field_varint(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _field_bytes(number: int, data: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; the high bit says that more follow. A negative int64 takes ten bytes."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
