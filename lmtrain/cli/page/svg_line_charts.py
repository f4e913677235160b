"""Curves over steps, tokens and time: JSON data for a page, and SVG drawings for papers and readers without scripts.

Used by the report, and by `lmtrain runs plot` for its axes. In a browser, chart.js draws the same data again so that a
reader can zoom. Reads no files of a run.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, NamedTuple

from lmtrain.cli.page.html_document import NUM_COLOURS, svg_element, svg_line, svg_polyline, svg_rect, svg_text
from lmtrain.units import format_seconds

Form = Literal["number", "count", "bytes", "seconds", "percent"]  # the kind of a number, which decides its format

_BYTES = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_ROUND_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
AXES = ("tokens", "step", "seconds")
_AXIS_LABELS = {"tokens": "tokens", "step": "steps", "seconds": "time trained"}
_AXIS_FORMS: dict[str, Form] = {"tokens": "count", "step": "count", "seconds": "seconds"}
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 64.0, 14.0, 26.0, 40.0
_LEGEND_ROW, _LETTER_WIDTH = 16.0, 6.3  # of the legend: height of a row, width of a letter
_NUM_DASHES = 4
_MAX_DRAWN_POINTS = 1400  # because: a picture that cannot be zoomed shows no more points of a curve


def ticks(low: float, high: float, max_count: int, form: Form = "number") -> list[float]:
    """Return round values at which to place ticks on a linear axis from `low` to `high`: at most about `max_count`, in
    ascending order; [low] for an empty range. `form`, such as "seconds", decides which values count as round.
    """
    if not high > low:
        return [low]
    step = _tick_step((high - low) / max_count, form)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _tick_step(min_step: float, form: Form) -> float:
    """Return a round distance between the ticks of an axis: the smallest that is `min_step` or more. `form`, the kind
    of number, decides what is round: 1, 2, 5, 10, 15, 30, 60 for seconds, for example.
    """
    if form == "seconds" and 1 <= min_step <= _ROUND_SECONDS[-1]:
        return float(next(step for step in _ROUND_SECONDS if step >= min_step))
    scale = 86400.0 if form == "seconds" and min_step > _ROUND_SECONDS[-1] else 1.0
    if form == "bytes":
        scale = 1024.0 ** max(math.floor(math.log(min_step, 1024)), 0)
    power = 10.0 ** math.floor(math.log10(min_step / scale))
    return scale * power * next(factor for factor in (1, 2, 5, 10) if factor * power >= min_step / scale * (1 - 1e-9))


def log_ticks(low: float, high: float, max_count: int) -> list[float]:
    """Return values at which to place ticks on a logarithmic axis from `low` to `high`, both above 0: powers of ten, or
    also 2 and 5 times them if these are too few. About `max_count` are wanted at most.

    A range too short for either gets evenly spaced ticks.
    """
    if high / low < 3:
        return ticks(low, high, max_count)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades_per_tick = max(math.ceil((last - first) / max_count), 1)

    def within(*factors: int) -> list[float]:
        values = [factor * 10.0**power for power in range(first, last + 1, decades_per_tick) for factor in factors]
        return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]

    values = within(1)
    if last - first <= max(max_count // 3, 1) or (decades_per_tick == 1 and len(values) < 3):
        values = within(1, 2, 5)
    return values if len(values) > 1 or decades_per_tick > 1 else ticks(low, high, max_count)


def tick_labels(values: Sequence[float], form: Form) -> list[str]:
    """Return the labels of the ticks at `values`: texts with units, all with the same number of significant digits (4
    or more), the smallest with which no two labels are equal.
    """
    candidates = ([format_value(value, form, digits) for value in values] for digits in range(4, 12))
    shortest = [format_value(value, form) for value in values]
    return next((texts for texts in candidates if len(set(texts)) == len(texts)), shortest)


def format_value(value: float, form: Form, digits: int = 4) -> str:
    """Format a value as short text by its form: with a unit for bytes, counts and seconds, as a percentage, or as a
    plain number. `digits` is the approximate number of significant digits; seconds always have three. NaN becomes a
    dash.
    """
    if math.isnan(value):
        return "-"
    if form == "bytes":
        size, name = next((unit for unit in _BYTES if abs(value) >= unit[0]), (1, "B"))
        return f"{value / size:.{digits}g} {name}"
    if form == "seconds":
        if abs(value) < 1:
            return "0" if value == 0 else f"{value * 1000:.3g} ms"
        return f"{value:.3g}s" if abs(value) < 60 else format_seconds(value)
    if form == "percent":
        return f"{100 * value:.{digits}g}%"
    if form == "count" or abs(value) >= 10_000:
        size, name = next((unit for unit in _COUNTS if abs(value) >= unit[0]), (1, ""))
        return f"{value / size:.{digits + 1}g}{name}"
    return "0" if value == 0 else f"{value:.{digits - 3}e}" if abs(value) < 1e-3 else f"{value:.{digits + 1}g}"


@dataclass(frozen=True)
class Points:
    """Measured values and their positions on each axis; an axis whose positions are unknown is empty."""

    step: Sequence[float]
    tokens: Sequence[float]
    seconds: Sequence[float]
    value: Sequence[float]

    def on(self, axis: str) -> Sequence[float]:
        column: Sequence[float] = getattr(self, axis)
        return column


@dataclass(frozen=True)
class Curve:
    """A curve of a figure: measured values of a run."""

    run: int  # index into Charts.runs
    name: str
    points: Points
    mean: Points | None = None  # the data to smooth, if `points` holds extremes of many values
    dots: bool = False  # True: also draw a dot for each measurement, if there are few


@dataclass(frozen=True)
class Figure:
    """A figure: curves with a common title, unit and value axis."""

    key: str
    title: str
    form: Form
    curves: Sequence[Curve] = ()
    note: str = ""
    log: bool = False
    wide: bool = False
    smooth: bool = True
    zero: bool = False  # True: the value axis begins at 0, so that a little more does not look like twice as much


@dataclass(frozen=True)
class Mark:
    """An event of a run that is drawn as a line across the figures: a save, restart, stop or fault."""

    run: int  # index into Charts.runs
    kind: str
    step: float
    tokens: float
    seconds: float
    note: str


@dataclass(frozen=True)
class Charts:
    """The figures of a page, with the names of its runs and the marks on the axis."""

    runs: Sequence[str]
    figures: Sequence[Figure]
    marks: Sequence[Mark] = field(default_factory=list)

    @property
    def axes(self) -> list[str]:
        """The axes that every curve has values for."""
        curves = [curve for figure in self.figures for curve in figure.curves]
        return [axis for axis in AXES if all(len(curve.points.on(axis)) for curve in curves)] or ["step"]

    def to_json(self) -> str:
        """Return the charts as JSON text that is safe inside an HTML <script> element: "<" is escaped."""
        data = {
            "runs": list(self.runs), "axes": self.axes,
            "figures": [_figure_data(figure) for figure in self.figures],
            "marks": [
                [m.run, m.kind, _whole_or_rounded(m.step), _whole_or_rounded(m.tokens), _rounded(m.seconds), m.note]
                for m in self.marks
            ],
        }  # fmt: skip
        return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def draw_figure(charts: Charts, figure: Figure, width: float = 1060, height: float = 320) -> str:
    """Draw a figure's curves over `charts.axes[0]` and return an SVG element as text, `width` x `height` pixels. If the
    legend needs several rows, the picture becomes higher than `height`. A figure without values gets a note instead.
    """
    axis = charts.axes[0]
    positions = [x for curve in figure.curves for x in curve.points.on(axis)]
    values = [y for curve in figure.curves for y in curve.points.value if y > 0 or not figure.log]
    if not values:
        note = svg_text(_LEFT_MARGIN, 34, f"{figure.title}: nothing has been recorded", "soft")
        return svg_element(60, [note], figure.title, width)
    first, last = min(positions), max(positions)
    low, high = _axis_range(0.0 if figure.zero and not figure.log else min(values), max(values), figure.log)
    entries = _place_legend(charts, figure, width)
    top = _TOP_MARGIN + _LEGEND_ROW * entries[-1].row
    height += _LEGEND_ROW * entries[-1].row

    def x(position: float) -> float:
        return _LEFT_MARGIN + (position - first) / ((last - first) or 1.0) * (width - _LEFT_MARGIN - _RIGHT_MARGIN)

    def y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if figure.log else (value - low) / (high - low)
        return height - _BOTTOM_MARGIN - share * (height - top - _BOTTOM_MARGIN)

    def parts() -> Iterator[str]:
        y_ticks = log_ticks(low, high, 6) if figure.log else ticks(low, high, 6, figure.form)
        for value, label in zip(y_ticks, tick_labels(y_ticks, figure.form), strict=True):
            yield svg_line(_LEFT_MARGIN, y(value), width - _RIGHT_MARGIN, y(value), "grid")
            yield svg_text(_LEFT_MARGIN - 6, y(value) + 4, label, "soft small", "end")
        x_ticks = ticks(first, last, 8, _AXIS_FORMS[axis])
        for position, label in zip(x_ticks, tick_labels(x_ticks, _AXIS_FORMS[axis]), strict=True):
            # because: a label must end inside the picture
            middle = min(x(position), width - _LETTER_WIDTH / 2 * len(label) - 1)
            yield svg_text(middle, height - _BOTTOM_MARGIN + 16, label, "soft small", "middle")
        yield svg_text(width - _RIGHT_MARGIN, height - 6, _AXIS_LABELS[axis], "soft small", "end")
        for entry in entries:
            yield from _draw_curve(entry, axis, x, y, figure.log)
        for entry in entries:
            yield from _draw_legend_entry(entry)

    return svg_element(height, parts(), figure.title, width)


class _LegendEntry(NamedTuple):
    curve: Curve
    css_class: str  # the colour
    dash: int  # number of the dash pattern
    label: str
    x: float
    row: int


def _draw_curve(entry: _LegendEntry, axis: str, to_x: Any, to_y: Any, log: bool) -> Iterator[str]:
    """Yield the SVG elements of a legend entry's curve over the x axis `axis`, such as "step". `to_x` and `to_y`
    convert positions and values to pixels. With `log`, values of 0 or less are left out.
    """
    curve, css_class = entry.curve, entry.css_class
    points = [
        (to_x(position), to_y(value))
        for position, value in zip(curve.points.on(axis), curve.points.value, strict=True)
        if value > 0 or not log
    ]
    drawn = points[:: math.ceil(len(points) / _MAX_DRAWN_POINTS)] if curve.mean is None else points
    yield svg_polyline(drawn, f"curve {css_class} d{entry.dash}")
    if len(points) == 1 or (curve.dots and len(points) <= 60):  # because: a line of one point is invisible
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="{css_class}"/>' for x, y in points)


def _place_legend(charts: Charts, figure: Figure, width: float) -> list[_LegendEntry]:
    """Return a legend entry for each curve of the figure: its color and dash, its label, and its position in rows that
    fit `width` pixels. Labels wider than the figure are shortened.
    """
    entries: list[_LegendEntry] = []
    x, row = _LEFT_MARGIN, 0
    has_several_runs, names = len(charts.runs) > 1, list(dict.fromkeys(curve.name for curve in figure.curves))
    for number, curve in enumerate(figure.curves):
        label = f"{charts.runs[curve.run]}: {curve.name}" if has_several_runs else curve.name
        while (entry_width := 34 + _LETTER_WIDTH * _display_width(label)) > width - _LEFT_MARGIN and len(label) > 1:
            label = f"{label[:-2]}…"
        if entries and x + entry_width > width:
            x, row = _LEFT_MARGIN, row + 1
        # because: with several runs, colours are for runs and dash patterns for the curves of a run
        css_class = f"r{(curve.run if has_several_runs else number) % NUM_COLOURS}"
        dash = names.index(curve.name) % _NUM_DASHES if has_several_runs else 0
        entries.append(_LegendEntry(curve, css_class, dash, label, x, row))
        x += entry_width
    return entries


def _display_width(label: str) -> int:
    """Return the number of columns that a label takes; wide East Asian characters count twice."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in label)


def _draw_legend_entry(entry: _LegendEntry) -> Iterator[str]:
    y = 8 + _LEGEND_ROW * entry.row
    if entry.dash:
        yield svg_polyline([(entry.x - 8, y + 2), (entry.x + 10, y + 2)], f"curve {entry.css_class} d{entry.dash}")
    else:
        yield svg_rect(entry.x, y, 10, 4, entry.css_class)
    yield svg_text(entry.x + 14, y + 6, entry.label, "soft small")


def figure_element(charts: Charts, figure: Figure) -> str:
    """Return a figure as the text of an HTML <figure> element: title, SVG drawing and note. In a browser, the page's
    script chart.js replaces the drawing by an interactive one.
    """
    note = f'<p class="soft small">{escape(figure.note)}</p>' if figure.note else ""
    css_class = "figure wide" if figure.wide else "figure"
    size = (1060.0, 340.0) if figure.wide else (520.0, 240.0)
    return (
        f'<figure class="{css_class}" data-key="{escape(figure.key, quote=True)}" tabindex="0">'
        f"<figcaption>{escape(figure.title)}</figcaption>{draw_figure(charts, figure, *size)}{note}</figure>"
    )


def _axis_range(low: float, high: float, log: bool) -> tuple[float, float]:
    """Return the lowest and highest value to show on a y axis for values from `low` to `high`: with some space beyond
    both, and beginning at 0 if `low` is close to 0. A logarithmic axis (`log`) gets 10% beyond both ends.
    """
    if log:
        return (low / 1.1, high * 1.1)
    spare = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return (0.0 if 0 <= low < 2 * spare else low - spare), high + spare


def _figure_data(figure: Figure) -> dict[str, Any]:
    curves: list[dict[str, Any]] = [
        {
            "run": curve.run, "name": curve.name, "dots": curve.dots, **_point_columns(curve.points),
            **({"mean": _point_columns(curve.mean)} if curve.mean is not None else {}),
        }
        for curve in figure.curves
    ]  # fmt: skip
    keys = ("key", "title", "form", "log", "wide", "smooth", "zero")
    return {key: getattr(figure, key) for key in keys} | {"curves": curves}


def _point_columns(points: Points) -> dict[str, list[float]]:
    return {
        "step": [_whole_or_rounded(value) for value in points.step],
        "tokens": [_whole_or_rounded(value) for value in points.tokens],
        "seconds": [_rounded(value, 8) for value in points.seconds],
        "value": [_rounded(value) for value in points.value],
    }  # fmt: skip


def _whole_or_rounded(value: float) -> float | None:
    return None if not math.isfinite(value) else int(value) if value == int(value) else _rounded(value, 10)


def _rounded(value: float, digits: int = 7) -> Any:
    """Round a number to `digits` significant digits for JSON: an int if the result is whole, None for NaN and infinity.
    """
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded
