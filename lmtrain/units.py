"""Parsing and formatting of human sizes (300B tokens, 80GiB, 12h), for settings, plans and every display."""

from __future__ import annotations

import math
import re

_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTE_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}b": base**power
    for power, prefix in enumerate("kmgtp", 1)
    for suffix, base in (("", 1000), ("i", 1024))
}
_SECOND_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_ROUNDING = 1e-9  # because: 1.1 * 1e9 in floating point need not be a whole number exactly
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def _parse(text: str, units: dict[str, int] | dict[str, float], example: str) -> float:
    """Parse a number with an optional unit, in any case; `units` maps a lower-case unit to its factor. Raise a
    ValueError, with `example` in its text, if it is malformed.
    """
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text} is not a size such as {example}")
    value = float(match[1].replace("_", "")) * units[match[2].lower()]
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def parse_count(text: str) -> int:
    """Parse a count such as 300B (300_000_000_000), with the units k, M, B and T for powers of a thousand. Raise a
    ValueError if it is malformed or not a whole number.
    """
    value = _parse(text, _COUNT_UNITS, "2000, 10M or 300B")
    if abs(value - round(value)) > _ROUNDING * value:
        raise ValueError(f"{text} is not a whole number")
    return round(value)


def parse_bytes(text: str) -> int:
    return round(_parse(text, _BYTE_UNITS, "512MiB or 80GB"))


def parse_seconds(text: str) -> float:
    return _parse(text, _SECOND_UNITS, "90s, 30min or 12h")


def format_count(value: float) -> str:
    """Format a count with three significant digits: 12_345_678 -> "12.3M"."""
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def plural(count: float, noun: str, count_text: str | None = None) -> str:
    """Format a count and its noun: "1 document", "2 documents". `count_text` overrides the text of the count."""
    return f"{count if count_text is None else count_text} {noun}{'' if count == 1 else 's'}"


def format_bytes(value: float) -> str:
    for size, name in ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= size:
            return f"{value / size:.1f} {name}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """Format a duration in seconds with its two largest units: 3725 -> "1h02m"."""
    if value < 59.95:
        return f"{value:.1f}s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def format_measure(name: str, value: float) -> str:
    """Format an evaluation measure by its name: accuracies as percentages, perplexities with two decimals, others with
    four.
    """
    if 1e7 <= abs(value) < math.inf:
        return f"{value:.3e}"
    if not math.isfinite(value):
        return "too large" if value == math.inf else "undefined"
    if name.endswith("accuracy"):
        return f"{100 * value:.2f} %"
    return f"{value:,.2f}" if "perplexity" in name else f"{value:.4f}"
