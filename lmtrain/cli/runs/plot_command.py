"""`lmtrain runs plot`: curves in the terminal, drawn with braille characters of eight dots each.

Without colours, or if the output cannot show braille, each run is drawn with a letter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lmtrain.cli.page.svg_line_charts import Form, log_ticks, tick_labels, ticks
from lmtrain.errors import DataError, UsageError, own, spelling_hint
from lmtrain.observe.history.read_metrics_columns import Numbers, extreme_indices, read_record
from lmtrain.runfolder.folder_reader import expand_runs, read_runs
from lmtrain.runtime.files.similar_path import refuse_lists

_AXES: dict[str, Form] = {"step": "count", "tokens": "count", "seconds": "seconds"}
_KEY_FORMS: dict[str, Form] = {"memory_bytes": "bytes", "mfu": "percent", "data_wait_s": "seconds"}
_COLOURS = ("bright_blue", "yellow", "green", "magenta", "red", "cyan")
_BRAILLE_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, [row][column]
_BRAILLE_BASE = 0x2800

Curve = tuple[str, Numbers, Numbers]


def plot_runs(paths: Sequence[Path], key: str, axis: str, log: bool, height: int) -> None:
    """Plot a number of the step rows, such as "loss" (`key`), as a curve for each run in the terminal, `height` lines
    high. The x axis is `axis`: "step", "tokens" or "seconds"; `log` makes the y axis logarithmic. Raise UsageError or
    DataError if there is nothing to plot.
    """
    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole

    if axis not in _AXES:
        raise UsageError(f"--by={axis} is not an axis of the plot. {spelling_hint(axis, _AXES, own)}")
    screen = PlainConsole(highlight=False)
    curves = _read_curves(paths, key, axis, log)
    use_braille = screen.encoding.lower().startswith("utf") and (
        len(curves) == 1 or not (screen.color_system is None or screen.no_color)
    )
    for line in draw_curves(curves, key, axis, log, min(screen.width, 200), height, use_braille=use_braille):
        screen.print(line, soft_wrap=True)


def _read_curves(paths: Sequence[Path], key: str, axis: str, log: bool) -> list[Curve]:
    """Return (name, x positions, values of `key`) for each run that has recorded such values. Not finite ones are left
    out, and with `log` those up to 0. Raise UsageError if no run has recorded `key`, DataError if no value is left.
    """
    curves, known_keys = [], set()
    refuse_lists(paths)
    for run in read_runs(expand_runs(paths)):
        record = read_record(run.metrics)
        steps, values = record.column(key)
        known_keys |= record.columns.keys() - {"step", "seconds"}
        positions = steps if axis == "step" else record.interpolate(axis, steps)
        drawable = np.isfinite(positions) & ((values > 0) | (not log))
        if drawable.any():
            curves.append((run.name, positions[drawable], values[drawable]))
    if not curves and known_keys and key not in known_keys:
        hint = spelling_hint(key, known_keys, own)
        raise UsageError(f"--key={key} is not a number that the runs have recorded. {hint}")
    if not curves:
        raise DataError(
            f"The runs have recorded no number to plot for --key={key} over --by={axis}. Give runs that have trained."
        )
    return curves


def draw_curves(
    curves: Sequence[Curve], key: str, axis: str, log: bool, width: int, height: int, *, use_braille: bool
) -> Iterator[object]:
    """Yield the lines of a plot as rich Texts: title, `height` lines of drawing with a y axis, x axis and legend, at
    most `width` characters wide. Curves are drawn in braille dots, or with `use_braille=False` as a letter for each
    run.
    """
    from rich.text import Text

    low, high = min(float(y.min()) for _, _, y in curves), max(float(y.max()) for _, _, y in curves)
    first, last = min(float(x.min()) for _, x, _ in curves), max(float(x.max()) for _, x, _ in curves)
    if low == high:
        low, high = low - (abs(low) / 20 or 1), high + (abs(high) / 20 or 1)
        low = max(low, high / 2) if log else low
    form = "count" if key.startswith("tokens/") else _KEY_FORMS.get(key, "number")
    row_ticks = log_ticks(low, high, height // 3) if log else ticks(low, high, height // 3, form)
    row_ticks = row_ticks or [low, high]  # because: in a low picture there may be no round number
    row_labels = {}
    for value, label in zip(row_ticks, tick_labels(row_ticks, form), strict=True):
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        row_labels[round((1 - share) * (height - 1))] = label
    margin = max(map(len, row_labels.values())) + 2
    columns = max(width - margin - 1, 16)
    cells, owner = np.zeros((height, columns), np.int64), np.full((height, columns), -1)
    for number, (_, x, y) in enumerate(curves):
        for row, column, bit in _braille_dots(x, y, (first, last), (low, high), log, height, columns):
            cells[row, column] |= bit
            owner[row, column] = number
    yield Text(f"{key}{' (log)' * log}")
    for row in range(height):
        edge = "|" if not use_braille else "┤" if row in row_labels else "│"
        line = Text(f"{row_labels.get(row, ''):>{margin - 2}} {edge}")
        for column in range(columns):
            curve_number = owner[row, column]
            letter = chr(ord("a") + curve_number % 26)
            dots = chr(_BRAILLE_BASE + cells[row, column])
            mark = " " if curve_number < 0 else dots if use_braille else letter
            line.append(mark, style="" if curve_number < 0 else _COLOURS[curve_number % len(_COLOURS)])
        yield line
    ends = tick_labels([first, last], _AXES[axis])
    yield Text(" " * margin + ends[0] + ends[1].rjust(columns - len(ends[0])))
    names = Text(" " * margin)
    for number, (name, _, _) in enumerate(curves):
        mark = "" if len(curves) == 1 else "━ " if use_braille else f"{chr(ord('a') + number % 26)} "
        names.append(f"{mark}{name}   ", style=_COLOURS[number % len(_COLOURS)] if len(curves) > 1 else "")
    yield Text.assemble(names, Text(f"by {axis}"))


def _braille_dots(
    x: Numbers, y: Numbers, x_range: tuple[float, float], y_range: tuple[float, float], log: bool, height: int,
    columns: int,
) -> Iterator[tuple[int, int, int]]:  # fmt: skip
    """Yield (row, column, bit of the dot in the braille character) for each dot of a curve on a grid of `height` rows
    and `columns` columns of characters; neighboring points are joined. `x_range` and `y_range` are the values at the
    edges of the grid.
    """
    indices = extreme_indices(y, columns * 8)
    x, y = x[indices], y[indices]
    low, high = y_range
    share = np.log(y / low) / math.log(high / low) if log else (y - low) / (high - low)
    rows = np.rint((1 - share) * (height * 4 - 1)).astype(int).clip(0, height * 4 - 1).tolist()
    span = (x_range[1] - x_range[0]) or 1.0
    half_columns = np.rint((x - x_range[0]) / span * (columns * 2 - 1)).astype(int).tolist()
    previous = None
    for half_column, row in zip(half_columns, rows, strict=True):
        last_column, last_row = previous or (half_column, row)
        for dot_column in range(last_column, half_column + 1):
            part = (dot_column - last_column) / ((half_column - last_column) or 1)
            begin = last_row + (row - last_row) * part
            end = last_row + (row - last_row) * min(part + 1 / ((half_column - last_column) or 1), 1)
            for dot_row in range(math.floor(min(begin, end)), math.floor(max(begin, end)) + 1):
                yield dot_row // 4, dot_column // 2, _BRAILLE_BITS[dot_row % 4][dot_column % 2]
        previous = (half_column, row)
