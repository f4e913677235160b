"""`lmtrain runs plot`: curves in the terminal, eight points to a character. Called by runs.

Without colours, or where the output cannot show such characters, a letter stands for each run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lmtrain.errors import DataError, UsageError, spelling_hint
from lmtrain.observe.history.record import Numbers, extreme_indices, read_record
from lmtrain.page.chart import Form, log_ticks, tick_labels, ticks
from lmtrain.runfolder.folder import expand_runs, read_runs

_AXES: dict[str, Form] = {"step": "count", "tokens": "count", "seconds": "seconds"}
_FORMS: dict[str, Form] = {"memory_bytes": "bytes", "mfu": "percent", "data_wait_s": "seconds"}
_COLOURS = ("bright_blue", "yellow", "green", "magenta", "red", "cyan")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, rows by columns
_EMPTY = 0x2800

Curve = tuple[str, Numbers, Numbers]


def plot_runs(paths: Sequence[Path], key: str, by: str, log: bool, height: int) -> None:
    from lmtrain.cli.screen.console import PlainConsole

    if by not in _AXES:
        raise UsageError(f"--by={by} is no axis. {spelling_hint(by, _AXES)}")
    screen = PlainConsole(highlight=False)
    curves = _curves(paths, key, by, log)
    fine = screen.encoding.lower().startswith("utf") and (
        len(curves) == 1 or not (screen.color_system is None or screen.no_color)
    )
    for line in draw(curves, key, by, log, min(screen.width, 200), height, fine=fine):
        screen.print(line, soft_wrap=True)


def _curves(paths: Sequence[Path], key: str, by: str, log: bool) -> list[Curve]:
    found, known = [], set()
    for seen in read_runs(expand_runs(paths)):
        record = read_record(seen.metrics)
        steps, values = record.column(key)
        known |= record.columns.keys() - {"step", "seconds"}
        places = steps if by == "step" else record.interpolate(by, steps)
        kept = np.isfinite(places) & ((values > 0) | (not log))
        if kept.any():
            found.append((seen.name, places[kept], values[kept]))
    if not found and known and key not in known:
        raise UsageError(f"--key={key} stands in no row of a step. {spelling_hint(key, known)}")
    if not found:
        raise DataError(f"no row of a step has a number to draw ({key} by {by}). Give runs that have trained.")
    return found


def draw(
    curves: Sequence[Curve], key: str, by: str, log: bool, width: int, height: int, *, fine: bool
) -> Iterator[object]:
    """Lines of text with their colours."""
    from rich.text import Text

    low, high = min(float(y.min()) for _, _, y in curves), max(float(y.max()) for _, _, y in curves)
    left, right = min(float(x.min()) for _, x, _ in curves), max(float(x.max()) for _, x, _ in curves)
    if low == high:
        low, high = low - (abs(low) / 20 or 1), high + (abs(high) / 20 or 1)
        low = max(low, high / 2) if log else low
    levels = log_ticks(low, high, height // 3) if log else ticks(low, high, height // 3, _FORMS.get(key, "number"))
    levels = levels or [low, high]  # because: a low picture may have room for no round number
    said = {}
    for value, word in zip(levels, tick_labels(levels, _FORMS.get(key, "number")), strict=True):
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        said[round((1 - share) * (height - 1))] = word
    margin = max(map(len, said.values())) + 2
    columns = max(width - margin - 1, 16)
    cells, owner = np.zeros((height, columns), np.int64), np.full((height, columns), -1)
    for number, (_, x, y) in enumerate(curves):
        for row, column, bit in _dots(x, y, (left, right), (low, high), log, height, columns):
            cells[row, column] |= bit
            owner[row, column] = number
    yield Text(f"{key}{' (log)' * log}")
    for row in range(height):
        edge = "|" if not fine else "┤" if row in said else "│"
        line = Text(f"{said.get(row, ''):>{margin - 2}} {edge}")
        for column in range(columns):
            whose = owner[row, column]
            mark = " " if whose < 0 else chr(_EMPTY + cells[row, column]) if fine else chr(ord("a") + whose % 26)
            line.append(mark, style="" if whose < 0 else _COLOURS[whose % len(_COLOURS)])
        yield line
    ends = tick_labels([left, right], _AXES[by])
    yield Text(" " * margin + ends[0] + ends[1].rjust(columns - len(ends[0])))
    names = Text(" " * margin)
    for number, (name, _, _) in enumerate(curves):
        mark = "" if len(curves) == 1 else "━ " if fine else f"{chr(ord('a') + number % 26)} "
        names.append(f"{mark}{name}   ", style=_COLOURS[number % len(_COLOURS)] if len(curves) > 1 else "")
    yield Text.assemble(names, Text(f"by {by}"))


def _dots(
    x: Numbers, y: Numbers, across: tuple[float, float], up: tuple[float, float], log: bool, height: int, columns: int
) -> Iterator[tuple[int, int, int]]:
    """Characters with the point in them that is set; what lies between two points of a curve is filled."""
    kept = extreme_indices(y, columns * 8)
    x, y = x[kept], y[kept]
    share = np.log(y / up[0]) / math.log(up[1] / up[0]) if log else (y - up[0]) / (up[1] - up[0])
    rows = np.rint((1 - share) * (height * 4 - 1)).astype(int).clip(0, height * 4 - 1).tolist()
    span = (across[1] - across[0]) or 1.0
    places = np.rint((x - across[0]) / span * (columns * 2 - 1)).astype(int).tolist()
    before = None
    for place, row in zip(places, rows, strict=True):
        last_place, last_row = before or (place, row)
        for between in range(last_place, place + 1):
            part = (between - last_place) / ((place - last_place) or 1)
            begin = last_row + (row - last_row) * part
            end = last_row + (row - last_row) * min(part + 1 / ((place - last_place) or 1), 1)
            for at in range(math.floor(min(begin, end)), math.floor(max(begin, end)) + 1):
                yield at // 4, between // 2, _DOTS[at % 4][between % 2]
        before = (place, row)
