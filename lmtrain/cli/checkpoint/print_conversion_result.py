"""Print what an import has read, an export or merge has written, or a reshard has changed, as a table of facts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from lmtrain.cli.screen.print_facts_and_tables import print_facts
from lmtrain.config.settings_base import kinds, show
from lmtrain.errors import join_few
from lmtrain.models.model_settings import ModelSettings
from lmtrain.units import format_bytes, format_seconds

_MAX_NAMES = 6  # names in a line; --json has all
_LABELS = {
    "num_files": "files", "bytes_done_before": "done before", "seconds": "time", "largest_difference": "difference",
    "allowed_difference": "at most", "checkpoint_version": "version", "rows_without_token": "without token",
}  # fmt: skip


def print_conversion(title: str, facts: dict[str, Any]) -> None:
    """Print a title and facts: a line each, and for what was left out or ignored a line for each reason."""
    print_facts(title, _lines(facts))


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the result of a conversion, `facts`, as (label, text) pairs for printing, one for each line of the table.
    Bytes, seconds and counts are formatted with units.
    """
    for key, value in facts.items():
        name = _LABELS.get(key, key.replace("_", " "))
        if key == "bytes_done_before" and not value:
            continue
        if key in ("left_out", "ignored"):
            yield from _by_reason(name, value)
        elif key == "settings":
            yield name, _describe_settings(value)
        elif "bytes" in key and isinstance(value, int):
            yield name, format_bytes(value)
        elif key == "seconds":
            yield name, format_seconds(value)
        elif isinstance(value, (int, float)):
            yield name, f"{value:,}" if isinstance(value, int) else f"{value:.2g}"
        else:
            yield name, str(value)


def _describe_settings(values: dict[str, Any]) -> str:
    """Return a model's settings as text, "key=value key=value, and defaults"; keys whose value is the default of the
    model's kind are left out.
    """
    defaults = {field.name: field.default for field in fields(kinds(ModelSettings)[values["kind"]])}
    text = " ".join(f"{key}={show(value)}" for key, value in values.items() if value != defaults.get(key, MISSING))
    return f"{text}, and defaults"


def _by_reason(name: str, reasons: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Group things by the reason why they were left out, and yield a table line for each reason: (name, "thing, thing:
    reason"). `reasons` maps each thing to its reason, and `name` is the label of all lines. If it is empty, yield
    (name, "nothing").
    """
    names = defaultdict[str, list[str]](list)
    for item, reason in reasons.items():
        names[reason].append(item)
    for reason, items in names.items():
        yield name, f"{join_few(items, max_shown=_MAX_NAMES)}: {reason}"
    if not names:
        yield name, "nothing"
