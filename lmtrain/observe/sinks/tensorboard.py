"""TensorBoard sink: rows as scalars, settings as text and hyperparameters, and the layout of the pages of curves.

Called through queued_sink.py. The first half encodes events as bytes, without TensorFlow; the second half writes a
run's record as events.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lmtrain.observe.metrics import GrowingFile
from lmtrain.observe.sinks.queued_sink import CHARTS, row_scalars
from lmtrain.runfolder.settings_differences import flatten
from lmtrain.runfolder.tensorboard_metric_names import Histogram
from lmtrain.runtime.files.crc32c import crc32c
from lmtrain.runtime.terminal_safe_text import warn

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # wire types
_DT_STRING = 7
_SESSION_START = 1
_NUMBER, _TEXT, _BOOL = 2, 3, 4  # fields of google.protobuf.Value
_HPARAMS, _LAYOUT = "hparams", "custom_scalars"
_SUCCESS, _FAILURE = 1, 2
_EXCLUDED_GROUPS = ("run", "observe", "hardware")  # groups of settings by which runs are not compared
_MAX_FLOAT = 3.4028234663852886e38  # because: the value is stored as a 4-byte float, which holds no larger number


def field_key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def field_varint(number: int, value: int) -> bytes:
    return field_key(number, VARINT) + _varint(value)


def field_bytes(number: int, data: bytes) -> bytes:
    return field_key(number, BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Encode an integer as a protobuf varint: 7 bits a byte, lowest first; a byte's high bit means that more bytes
    follow. Negative numbers take ten bytes.
    """
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field_double(number: int, value: float) -> bytes:
    return field_key(number, DOUBLE) + struct.pack("<d", value)


def field_doubles(number: int, values: Iterable[float]) -> bytes:
    """Encode a packed repeated double field."""
    return field_bytes(number, b"".join(struct.pack("<d", value) for value in values))


def field_text(number: int, text: str) -> bytes:
    return field_bytes(number, text.encode())


class EventWriter:
    """Writer of the event file of one attempt, which starts after `start_step` steps.

    The session-start event makes TensorBoard discard what earlier attempts wrote beyond that step.
    """

    def __init__(
        self, folder: Path, start_step: int, clock: Callable[[], float] = time.time,
        report: Callable[[str], None] = warn,
    ) -> None:  # fmt: skip
        self._clock = clock
        # because: TensorBoard reads a folder's files in the order of their names, whatever the clocks show
        name = f"events.out.tfevents.{len(list(folder.glob('*tfevents*'))):06d}.lmtrain"
        version = self._encode_event(field_bytes(3, b"brain.Event:2"), step=0)
        # because: TensorBoard discards events whose step is >= the step of this event
        session_start = self._encode_event(field_bytes(7, field_varint(1, _SESSION_START)), step=start_step + 1)
        self._file = GrowingFile(folder / name, "values", report, head=version + session_start, new=True)

    def write_scalar(self, tag: str, value: float, step: int) -> None:
        value = math.copysign(math.inf, value) if abs(value) > _MAX_FLOAT else value
        self._write_summary(tag, field_key(2, FLOAT) + struct.pack("<f", value), step)

    def write_text(self, tag: str, text: str) -> None:
        """Write Markdown for TensorBoard's text tab."""
        self.write_plugin_data(tag, "text", text=text.encode())

    def write_histogram(self, tag: str, histogram: Histogram, step: int) -> None:
        buckets = histogram.buckets()
        values = (histogram.low, histogram.high, float(histogram.count), histogram.total, histogram.total_of_squares)
        numbers = b"".join(field_double(number, value) for number, value in enumerate(values, 1))
        limits = field_doubles(6, [up_to for _, up_to, _ in buckets])
        counts = field_doubles(7, [count for *_, count in buckets])
        self._write_summary(tag, field_bytes(5, numbers + limits + counts), step)

    def write_plugin_data(
        self, tag: str, name: str, *, content: bytes = b"", text: bytes | None = None, step: int = 0
    ) -> None:
        """Write data of the TensorBoard plugin `name` under `tag`: `content` goes into the metadata for the plugin, and
        `text` into a string tensor. Both may be left out.
        """
        metadata = field_bytes(1, field_bytes(1, name.encode()) + (field_bytes(2, content) if content else b""))
        shape = field_bytes(2, field_bytes(2, field_varint(1, 1)))
        tensor = field_varint(1, _DT_STRING) + shape + field_bytes(8, text) if text is not None else b""
        self._write_summary(tag, field_bytes(9, metadata) + (field_bytes(8, tensor) if tensor else b""), step)

    def close(self) -> None:
        self._file.close()

    def _write_summary(self, tag: str, value: bytes, step: int) -> None:
        summary = field_bytes(5, field_bytes(1, field_bytes(1, tag.encode()) + value))
        self._file.append(self._encode_event(summary, step))

    def _encode_event(self, payload: bytes, step: int) -> bytes:
        return tfrecord(field_double(1, self._clock()) + field_varint(2, step) + payload)


def tfrecord(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))


def _masked_crc(data: bytes) -> int:
    """Return TFRecord's masked CRC: rotated plus a constant, so that a checksum of checksums is not degenerate."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class TensorBoardSink:
    """Sink that writes rows and histograms as TensorBoard events."""

    def __init__(self, events: EventWriter, settings: Mapping[str, Any], start_time_s: float) -> None:
        """Write the settings (the content of config.json) as text and as hyperparameters.

        `start_time_s` is the Unix time at which the run started.
        """
        self._events = events
        events.write_text("settings", f"```json\n{json.dumps(settings, indent=2)}\n```")
        events.write_plugin_data("custom_scalars__config__", _LAYOUT, text=_layout())
        compared = {key: value for key, value in settings.items() if key not in _EXCLUDED_GROUPS}
        # because: a protobuf map is a list of pairs
        values = b"".join(
            field_bytes(1, field_text(1, name) + field_bytes(2, _sortable_value(value)))
            for name, value in flatten(compared)
        )
        events.write_plugin_data(
            "_hparams_/session_start_info", _HPARAMS,
            content=field_varint(1, 0) + field_bytes(3, values + field_double(5, start_time_s)),
        )  # fmt: skip

    def write_row(self, row: Mapping[str, Any]) -> None:
        for tag, value in row_scalars(row).items():
            self._events.write_scalar(tag, value, row["step"])
        if row["event"] == "stop":
            status = field_varint(1, _FAILURE if row.get("stopped_by") else _SUCCESS)
            self._events.write_plugin_data("_hparams_/session_end_info", _HPARAMS, content=field_bytes(4, status))

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        for tag, histogram in histograms.items():
            self._events.write_histogram(tag, histogram, step)

    def close(self) -> None:
        self._events.close()


def _layout() -> bytes:
    """Encode, as protobuf bytes, which charts TensorBoard's page of custom scalars shows. They are those of CHARTS,
    grouped by category, each chart with the name patterns of its curves.
    """
    pages = b""
    for page, charts in CHARTS.items():
        charts_data = b""
        for title, tags in charts.items():
            lines = b"".join(field_text(1, tag) for tag in tags)
            charts_data += field_bytes(2, field_text(1, title) + field_bytes(2, lines))
        pages += field_bytes(2, field_text(1, page) + charts_data)
    return pages


def _sortable_value(value: Any) -> bytes:
    """Encode a setting as bytes of a google.protobuf.Value: a boolean or a number as such, so that TensorBoard's table
    of hyperparameters can sort by it, anything else as text.
    """
    if isinstance(value, bool):
        return field_varint(_BOOL, value)
    if isinstance(value, (int, float)):
        return field_double(_NUMBER, value)
    return field_text(_TEXT, value if isinstance(value, str) else json.dumps(value))
