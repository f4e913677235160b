"""Print what an import has read or an export has written, as a table of facts."""

from __future__ import annotations

from typing import Any

from lmtrain.cli.screen.print_output import echo
from lmtrain.units import format_bytes, format_seconds


def print_exchange(facts: dict[str, Any]) -> None:
    """Print the facts of an import, an export or a reshard, a line each."""
    for key, value in facts.items():
        if key == "bytes_done_before" and not value:
            continue
        if "bytes" in key and isinstance(value, int):
            value = format_bytes(value)
        elif key == "seconds":
            key, value = "time", format_seconds(value)
        elif isinstance(value, (int, float)):
            value = f"{value:,}" if isinstance(value, int) else f"{value:.2g}"
        echo(f"{key.removeprefix('num_').replace('_', ' '):18} {value}")
