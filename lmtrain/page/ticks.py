"""Round numbers along an axis, and how they are written. Called by chart.py; chart.js does the same in the browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lmtrain.units import format_seconds

Form = Literal["number", "count", "bytes", "seconds", "percent"]

_BYTES = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_NICE_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def ticks(low: float, high: float, most: int, form: Form = "number") -> list[float]:
    """At most about `most` of them from `low` to `high`."""
    if not high > low:
        return [low]
    step = _step((high - low) / most, form)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _step(rough: float, form: Form) -> float:
    if form == "seconds" and 1 <= rough <= _NICE_SECONDS[-1]:
        return float(next(step for step in _NICE_SECONDS if step >= rough))
    scale = 86400.0 if form == "seconds" and rough > _NICE_SECONDS[-1] else 1.0
    if form == "bytes":
        scale = 1024.0 ** max(math.floor(math.log(rough, 1024)), 0)
    power = 10.0 ** math.floor(math.log10(rough / scale))
    return scale * power * next(nice for nice in (1, 2, 5, 10) if nice * power >= rough / scale * (1 - 1e-9))


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with 2 and 5 between where there are few of them; even steps where that says too little."""
    if high / low < 3:
        return ticks(low, high, most)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(math.ceil((last - first) / most), 1)

    def within(*between: int) -> list[float]:
        found = [nice * 10.0**power for power in range(first, last + 1, every) for nice in between]
        return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]

    found = within(1)
    if last - first <= max(most // 3, 1) or (every == 1 and len(found) < 3):
        found = within(1, 2, 5)
    return found if len(found) > 1 or every > 1 else ticks(low, high, most)


def labels(values: Sequence[float], form: Form) -> list[str]:
    """As short as tells them apart."""
    tries = ([written(value, form, few) for value in values] for few in range(4, 12))
    return next((found for found in tries if len(set(found)) == len(found)), [written(v, form) for v in values])


def written(value: float, form: Form, few: int = 4) -> str:
    """Short: a tick of an axis, or a value in passing; `few` digits, or one more. What is not known is a dash."""
    if math.isnan(value):
        return "-"
    if form == "bytes":
        size, name = next((unit for unit in _BYTES if abs(value) >= unit[0]), (1, "B"))
        return f"{value / size:.{few}g} {name}"
    if form == "seconds":
        if abs(value) < 1:
            return "0" if value == 0 else f"{value * 1000:.3g} ms"
        return f"{value:.3g}s" if abs(value) < 60 else format_seconds(value)
    if form == "percent":
        return f"{100 * value:.{few}g}%"
    if form == "count" or abs(value) >= 10_000:
        size, name = next((unit for unit in _COUNTS if abs(value) >= unit[0]), (1, ""))
        return f"{value / size:.{few + 1}g}{name}"
    return "0" if value == 0 else f"{value:.{few - 3}e}" if abs(value) < 1e-3 else f"{value:.{few + 1}g}"
