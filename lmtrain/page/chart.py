"""Curves over steps, tokens and time: as data for the page, and drawn as SVG for readers without scripts and papers.

Called by the report. In a browser chart.js draws the same data, and lets a reader zoom. Knows no run's files.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, NamedTuple

from lmtrain.page.document import NUM_COLOURS, line, polyline, rect, svg, text
from lmtrain.units import format_seconds

Form = Literal["number", "count", "bytes", "seconds", "percent"]

_BYTES = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_NICE_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
AXES = ("tokens", "step", "seconds")
_AXIS_WORDS = {"tokens": "tokens", "step": "steps", "seconds": "time trained"}
_FORMS: dict[str, Form] = {"tokens": "count", "step": "count", "seconds": "seconds"}
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 14.0, 26.0, 40.0
_ROW, _LETTER = 16.0, 6.3  # of names: the height of a row, the width of a letter
_NUM_DASHES = 4
_MOST_DRAWN = 1400  # points of a curve in a picture that cannot be zoomed


def ticks(low: float, high: float, most: int, form: Form = "number") -> list[float]:
    """Return round values from `low` to `high`, about `most` at the most."""
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
    """Return values as texts, as short as tells them apart."""
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


@dataclass(frozen=True)
class Points:
    """The same places on each axis, and what was measured there; an axis that is not known is empty."""

    step: Sequence[float]
    tokens: Sequence[float]
    seconds: Sequence[float]
    value: Sequence[float]

    def on(self, axis: str) -> Sequence[float]:
        found: Sequence[float] = getattr(self, axis)
        return found


@dataclass(frozen=True)
class Curve:
    run: int
    name: str
    points: Points
    mean: Points | None = None  # what smoothing begins from, where the points are extremes of many
    dots: bool = False  # few measurements, each of which counts


@dataclass(frozen=True)
class Figure:
    key: str
    title: str
    form: Form
    curves: Sequence[Curve] = ()
    said: str = ""
    log: bool = False
    wide: bool = False
    smooth: bool = True
    zero: bool = False  # its axis begins at 0; because: a bit more of memory must not look like twice as much


@dataclass(frozen=True)
class Mark:
    """Something that happened: a save, a restart, a fault."""

    run: int
    kind: str
    step: float
    tokens: float
    seconds: float
    said: str


@dataclass(frozen=True)
class Charts:
    runs: Sequence[str]
    figures: Sequence[Figure]
    marks: Sequence[Mark] = field(default_factory=list)

    @property
    def axes(self) -> list[str]:
        """The axes that every curve has values for."""
        curves = [curve for figure in self.figures for curve in figure.curves]
        return [axis for axis in AXES if all(len(curve.points.on(axis)) for curve in curves)] or ["step"]

    def to_json(self) -> str:
        """Return the charts as JSON that is safe inside a script element."""
        data = {
            "runs": list(self.runs), "axes": self.axes,
            "figures": [_figure_data(figure) for figure in self.figures],
            "marks": [[m.run, m.kind, _whole(m.step), _whole(m.tokens), _short(m.seconds), m.said] for m in self.marks],
        }  # fmt: skip
        return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def colour(charts: Charts, figure: Figure, curve: Curve) -> int:
    """Return a curve's colour: one for each run, or one for each curve if there is a single run."""
    return (curve.run if len(charts.runs) > 1 else figure.curves.index(curve)) % NUM_COLOURS


def dash(charts: Charts, figure: Figure, curve: Curve) -> int:
    """Curves of one run in one figure are told apart by it, where colours tell runs apart."""
    names = list(dict.fromkeys(one.name for one in figure.curves))
    return names.index(curve.name) % _NUM_DASHES if len(charts.runs) > 1 else 0


def drawn(charts: Charts, figure: Figure, width: float = 1060, height: float = 320) -> str:
    """Draw a figure as SVG over the first known axis; names that take several rows make it higher."""
    axis = charts.axes[0]
    places = [x for curve in figure.curves for x in curve.points.on(axis)]
    values = [y for curve in figure.curves for y in curve.points.value if y > 0 or not figure.log]
    if not values:
        return svg(60, [text(_LEFT, 34, f"{figure.title}: nothing has been recorded", "soft")], figure.title, width)
    left, right = min(places), max(places)
    low, high = _room(0.0 if figure.zero and not figure.log else min(values), max(values), figure.log)
    names = _names(charts, figure, width)
    top = _TOP + _ROW * names[-1].row
    height += _ROW * names[-1].row

    def x(place: float) -> float:
        return _LEFT + (place - left) / ((right - left) or 1.0) * (width - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if figure.log else (value - low) / (high - low)
        return height - _BOTTOM - share * (height - top - _BOTTOM)

    def parts() -> Iterator[str]:
        levels = log_ticks(low, high, 6) if figure.log else ticks(low, high, 6, figure.form)
        for value, said in zip(levels, labels(levels, figure.form), strict=True):
            yield line(_LEFT, y(value), width - _RIGHT, y(value), "grid")
            yield text(_LEFT - 6, y(value) + 4, said, "soft small", "end")
        along = ticks(left, right, 8, _FORMS[axis])
        for place, said in zip(along, labels(along, _FORMS[axis]), strict=True):
            middle = min(x(place), width - _LETTER / 2 * len(said) - 1)  # because: it ends within the picture
            yield text(middle, height - _BOTTOM + 16, said, "soft small", "middle")
        yield text(width - _RIGHT, height - 6, _AXIS_WORDS[axis], "soft small", "end")
        for curve in figure.curves:
            kind = f"r{colour(charts, figure, curve)}"
            yield from _curve(curve, axis, x, y, kind, dash(charts, figure, curve), figure.log)
        for name in names:
            yield from _drawn_name(name, colour(charts, figure, name.curve), dash(charts, figure, name.curve))

    return svg(height, parts(), figure.title, width)


def _curve(curve: Curve, axis: str, x: Any, y: Any, kind: str, dashed: int, log: bool) -> Iterator[str]:
    points = [(x(a), y(b)) for a, b in zip(curve.points.on(axis), curve.points.value, strict=True) if b > 0 or not log]
    yield polyline(
        points[:: math.ceil(len(points) / _MOST_DRAWN)] if curve.mean is None else points, f"curve {kind} d{dashed}"
    )
    if len(points) == 1 or (curve.dots and len(points) <= 60):  # because: a line of one point is not seen
        yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" class="{kind}"/>' for a, b in points)


class _Name(NamedTuple):
    curve: Curve
    said: str
    x: float
    row: int


def _names(charts: Charts, figure: Figure, width: float) -> list[_Name]:
    """Place the names of curves in as many rows as they need."""
    found: list[_Name] = []
    at, row = _LEFT, 0
    for curve in figure.curves:
        said = label(charts, curve)
        while (taken := 34 + _LETTER * _places(said)) > width - _LEFT and len(said) > 1:
            said = f"{said[:-2]}…"
        if found and at + taken > width:
            at, row = _LEFT, row + 1
        found.append(_Name(curve, said, at, row))
        at += taken
    return found


def _places(said: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in said)


def _drawn_name(name: _Name, colour: int, dashed: int) -> Iterator[str]:
    y = 8 + _ROW * name.row
    if dashed:
        yield polyline([(name.x - 8, y + 2), (name.x + 10, y + 2)], f"curve r{colour} d{dashed}")
    else:
        yield rect(name.x, y, 10, 4, f"r{colour}")
    yield text(name.x + 14, y + 6, name.said, "soft small")


def label(charts: Charts, curve: Curve) -> str:
    return f"{charts.runs[curve.run]}: {curve.name}" if len(charts.runs) > 1 else curve.name


def placed(charts: Charts, figure: Figure) -> str:
    """Return a figure for the page, where chart.js takes over the drawing."""
    said = f'<p class="soft small">{escape(figure.said)}</p>' if figure.said else ""
    kind = "figure wide" if figure.wide else "figure"
    size = (1060.0, 340.0) if figure.wide else (520.0, 240.0)
    return (
        f'<figure class="{kind}" data-key="{escape(figure.key, quote=True)}" tabindex="0">'
        f"<figcaption>{escape(figure.title)}</figcaption>{drawn(charts, figure, *size)}{said}</figure>"
    )


def _room(low: float, high: float, log: bool) -> tuple[float, float]:
    """Return the range of an axis, a little larger than that of the values."""
    if log:
        return (low / 1.1, high * 1.1)
    spare = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return (0.0 if 0 <= low < 2 * spare else low - spare), high + spare


def _figure_data(figure: Figure) -> dict[str, Any]:
    curves: list[dict[str, Any]] = [
        {
            "run": one.run, "name": one.name, "dots": one.dots, **_columns(one.points),
            **({"mean": _columns(one.mean)} if one.mean is not None else {}),
        }
        for one in figure.curves
    ]  # fmt: skip
    keys = ("key", "title", "form", "log", "wide", "smooth", "zero")
    return {key: getattr(figure, key) for key in keys} | {"curves": curves}


def _columns(points: Points) -> dict[str, list[float]]:
    return {
        "step": [_whole(value) for value in points.step], "tokens": [_whole(value) for value in points.tokens],
        "seconds": [_short(value, 8) for value in points.seconds], "value": [_short(value) for value in points.value],
    }  # fmt: skip


def _whole(value: float) -> float | None:
    return None if not math.isfinite(value) else int(value) if value == int(value) else _short(value, 10)


def _short(value: float, digits: int = 7) -> Any:
    if not math.isfinite(value):
        return None
    found = float(f"{value:.{digits}g}")
    return int(found) if found == int(found) and abs(found) < 1e15 else found
