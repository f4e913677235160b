"""TensorBoard's sink: rows to scalars, settings to text and hyperparameters, and the pages on which curves stand.

Called behind a run. How an event looks as bytes is in lmtrain/observe/sinks/event_file.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lmtrain.observe.measure.histogram import Histogram
from lmtrain.observe.sinks.event_file import EventWriter
from lmtrain.observe.sinks.names import CHARTS, scalars_of
from lmtrain.observe.sinks.protobuf import field_bytes, field_double, field_text, field_varint

_HPARAMS, _LAYOUT = "hparams", "custom_scalars"
_SUCCESS, _FAILURE = 1, 2
_LEFT_OUT = ("run", "observe", "hardware")  # of the settings: no two runs are compared by them
_NUMBER, _TEXT, _BOOL = 2, 3, 4  # fields of google.protobuf.Value


class TensorBoard:
    def __init__(self, events: EventWriter, settings: Mapping[str, Any], began_s: float) -> None:
        """`settings` as config.json has them."""
        self._events = events
        events.text("settings", f"```json\n{json.dumps(settings, indent=2)}\n```")
        events.plugin("custom_scalars__config__", _LAYOUT, text=_layout())
        chosen = {key: value for key, value in settings.items() if key not in _LEFT_OUT}
        values = b"".join(
            field_bytes(1, field_text(1, name) + field_bytes(2, value)) for name, value in _flat(chosen)
        )  # a map is a list of pairs
        start = field_bytes(3, values + field_double(5, began_s))
        events.plugin("_hparams_/session_start_info", _HPARAMS, content=field_varint(1, 0) + start)

    def row(self, row: Mapping[str, Any]) -> None:
        for tag, value in scalars_of(row).items():
            self._events.scalar(tag, value, row["step"])
        if row["event"] == "stop":
            status = _FAILURE if row.get("stopped_by") else _SUCCESS
            self._events.plugin("_hparams_/session_end_info", _HPARAMS, content=field_bytes(4, field_varint(1, status)))

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        for tag, histogram in found.items():
            self._events.histogram(tag, histogram, step)

    def close(self) -> None:
        self._events.close()


def _layout() -> bytes:
    """The page of custom scalars: a category for each sort of curve, with a chart for each thing."""
    pages = b""
    for page, charts in CHARTS.items():
        drawn = b""
        for title, tags in charts.items():
            lines = b"".join(field_text(1, tag) for tag in tags)
            drawn += field_bytes(2, field_text(1, title) + field_bytes(2, lines))
        pages += field_bytes(2, field_text(1, page) + drawn)
    return pages


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, bytes]]:
    """Every setting by its key, as a value that TensorBoard's table of runs can sort by."""
    for key, value in settings.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, bool):
            yield name, field_varint(_BOOL, value)
        elif isinstance(value, (int, float)):
            yield name, field_double(_NUMBER, value)
        else:
            yield name, field_text(_TEXT, value if isinstance(value, str) else json.dumps(value))
