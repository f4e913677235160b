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

from lmtrain.observe.growing_file import GrowingFile
from lmtrain.observe.measure.histogram import Histogram
from lmtrain.observe.safe_text import warn
from lmtrain.observe.sinks.protobuf import FLOAT, field_bytes, field_double, field_doubles, field_varint, key
from lmtrain.runtime.files.checksum import crc32c

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
        version = self._event(field_bytes(3, b"brain.Event:2"), step=0)
        began = self._event(field_bytes(7, field_varint(1, _SESSION_START)), step=start_step + 1)  # it forgets >=
        self._file = GrowingFile(folder / name, "values", say, head=version + began, new=True)

    def scalar(self, tag: str, value: float, step: int) -> None:
        value = math.copysign(math.inf, value) if abs(value) > _MOST else value
        self._summary(tag, key(2, FLOAT) + struct.pack("<f", value), step)

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Markdown for TensorBoard's text tab."""
        self.plugin(tag, "text", text=text.encode(), step=step)

    def histogram(self, tag: str, found: Histogram, step: int) -> None:
        buckets = found.buckets()
        values = (found.low, found.high, float(found.count), found.total, found.total_of_squares)
        numbers = b"".join(field_double(number, value) for number, value in enumerate(values, 1))
        limits = field_doubles(6, [up_to for _, up_to, _ in buckets])
        self._summary(tag, field_bytes(5, numbers + limits + field_doubles(7, [count for *_, count in buckets])), step)

    def plugin(self, tag: str, name: str, *, content: bytes = b"", text: bytes | None = None, step: int = 0) -> None:
        """What a plugin of TensorBoard reads: its own content, and a tensor of one string where it wants one."""
        metadata = field_bytes(1, field_bytes(1, name.encode()) + (field_bytes(2, content) if content else b""))
        shape = field_bytes(2, field_bytes(2, field_varint(1, 1)))
        tensor = field_varint(1, _DT_STRING) + shape + field_bytes(8, text) if text is not None else b""
        self._summary(tag, field_bytes(9, metadata) + (field_bytes(8, tensor) if tensor else b""), step)

    def close(self) -> None:
        self._file.close()

    def _summary(self, tag: str, value: bytes, step: int) -> None:
        self._file.append(self._event(field_bytes(5, field_bytes(1, field_bytes(1, tag.encode()) + value)), step))

    def _event(self, what: bytes, step: int) -> bytes:
        wall_time = field_double(1, self._clock())
        return record(wall_time + field_varint(2, step) + what)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))


def _masked_crc(data: bytes) -> int:
    """TFRecord stores a rotated checksum plus a constant, so that a checksum of checksums is not degenerate."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
