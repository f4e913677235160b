"""The sections of a report about ranks: layout, memory, the timeline of a traced step, kernel times.

Each rank is a square: its row is its pipeline rank, its column its replica, shard and tp rank. The section of a traced
step shows where the time went, how long each rank's own work took, and what ran when; the numbers come from
observe/timeline and are also in the page as JSON. Called by report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lmtrain.cli.page.html_document import (
    NUM_COLOURS,
    WIDTH,
    Part,
    Picture,
    html_table,
    json_element,
    section_heading,
    soft_paragraph,
    svg_element,
    svg_legend,
    svg_line,
    svg_rect,
    svg_text,
)
from lmtrain.cli.page.svg_line_charts import format_value, tick_labels, ticks
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import LmtrainError, join_few, shorten
from lmtrain.layout import Coordinate, Layout
from lmtrain.observe.history.read_metrics_columns import Record
from lmtrain.observe.profile.kernel_times import KernelTable, read_tables
from lmtrain.observe.spans.span_file import Kind
from lmtrain.observe.timeline.merge_ranks import Segment, merge_traces
from lmtrain.observe.timeline.step_breakdown import CLASSES, Heat, TimelineRow, rank_heat, step_times, timeline_rows
from lmtrain.runfolder.file_names import TRACES
from lmtrain.runfolder.folder_reader import RunFolder
from lmtrain.train.layouts.ranks_and_memory_table import merge_rows, rank_rows
from lmtrain.train.run_config import RunConfig
from lmtrain.units import format_bytes, format_count

_MIN_SHADE = 0.06  # share of the darkest colour for the rank with least memory
_MAX_OPACITY = 0.6  # because: the number in a square must be readable, in light and in dark colours
_MAX_DRAWN_RANKS = 4096
_MAX_TABLE_ROWS = 64
_BYTE_COLUMNS = {
    "weights_bytes": "weights", "masters_bytes": "masters", "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
}  # fmt: skip
_READ_ERRORS = (LmtrainError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_NUM_STEPS = 4  # the tables are means over so many of the newest steps
_MAX_TIMELINE_RANKS = 24
_PROFILE_FOLDER = "profile"
_MAX_KERNEL_TABLES = 4
_MAX_KERNELS = 15
_MAX_BARS = 4000
_BAR_NAMES = {
    "forward": "forward", "backward": "backward", "input": "backward for inputs", "weight": "weights' gradients",
    "compute": "other work", "pp": "messages", "dp": "dp", "tp": "tp", "world": "all ranks", "bubble": "waiting",
    "data": "data", "optimizer": "optimizer", "save": "save", "measuring": "measuring", "other": "other",
}  # fmt: skip


def memory_parts(run: RunFolder, record: Record, title_suffix: str) -> Iterator[Part]:
    layout, (step, peaks) = _read_layout(run), newest_peaks(record)
    if layout is None or len(peaks) != layout.world_size:  # because: it was another one that wrote them
        return
    fullest, emptiest = max(peaks), min(peaks)
    yield section_heading(
        f"Memory of each rank{title_suffix}",
        f"The most that each has held, as told by step {step:,}: the peak on the GPU, or what the process has resident "
        f"on a CPU. Rank {peaks.index(fullest)} holds most, {format_bytes(fullest)}; "
        f"rank {peaks.index(emptiest)} least, {format_bytes(emptiest)}.",
        f"memory{title_suffix}",
    )
    yield Picture(f"memory{title_suffix}", draw_memory(layout, peaks))
    data = json.dumps({"step": step, "peak_bytes": peaks}, separators=(",", ":"))
    yield json_element(data, f"memory-data{title_suffix}")


def newest_peaks(record: Record) -> tuple[int, list[int]]:
    """Return (step, peak memory in bytes of each rank) from the newest memory row of the run. Return (0, []) if its
    newest start has no valid one.
    """
    rows, starts = record.rows.get("memory", []), record.rows.get("start", [])
    if not rows or (starts and rows[-1].get("attempt") != starts[-1].get("attempt")):
        return 0, []
    peaks = rows[-1].get("peak_bytes")
    if not (isinstance(peaks, list) and any(peaks) and all(type(p) is int and 0 <= p < 1 << 60 for p in peaks)):
        return 0, []
    return rows[-1]["step"], peaks


def draw_memory(layout: Layout, peaks: Sequence[int]) -> str:
    """Return an SVG of the layout with a square for each rank: the more peak memory, the darker. `peaks` are in bytes,
    by rank.
    """
    fullest = max(peaks)
    squares = []
    for rank, peak in enumerate(peaks):
        coordinate, share = layout.coordinate(rank), peak / fullest
        tooltip = f"rank {rank}: {format_bytes(peak)}, {share:.1%} of the fullest"
        # because: ranks of a run differ by parts, not by orders
        squares.append(Square(coordinate, max(2 * share - 1, _MIN_SHADE), False, format_bytes(peak), tooltip))
    return draw_squares(squares, "memory of each rank")


def _read_layout(run: RunFolder) -> Layout | None:
    try:
        return build_settings(RunConfig, run.settings).parallel.layout
    except _READ_ERRORS:
        return None  # because: what is wrong with them is said where the layout is drawn


def layout_parts(run: RunFolder, title_suffix: str) -> Iterator[Part]:
    if not run.settings:
        return
    try:
        config = build_settings(RunConfig, run.settings)
        rows = rank_rows(config, config.model)
    except _READ_ERRORS as error:
        yield section_heading(f"Layout{title_suffix}", anchor=f"layout{title_suffix}")
        yield soft_paragraph(f"It cannot be told from these settings: {shorten(error)}")
        return
    yield section_heading(f"Layout{title_suffix}", config.parallel.layout_text, f"layout{title_suffix}")
    if 1 < len(rows) <= _MAX_DRAWN_RANKS:
        yield Picture(f"layout{title_suffix}", draw_layout(config, rows))
    elif len(rows) > 1:
        too_many = f"{len(rows):,} ranks are more than the {_MAX_DRAWN_RANKS:,} that a page shows"
        yield soft_paragraph(f"Not drawn: {too_many}.")
    merged = merge_rows(rows)
    if len(merged) > _MAX_TABLE_ROWS:
        yield soft_paragraph(f"Shown: the first {_MAX_TABLE_ROWS} of {len(merged):,} rows.")
    yield html_table([_layout_cells(row) for row in merged[:_MAX_TABLE_ROWS]])


def draw_layout(config: RunConfig, rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG of the layout with a box for each rank: down the pipeline ranks with their layers, across the
    replicas, shards and tp ranks. `rows` are those of `rank_rows`, one for each rank.
    """
    layout = config.parallel.layout
    columns = layout.dp_replicate * layout.dp_shard * layout.tp
    left, top = 96.0, 44.0
    cell_width = min((WIDTH - left) / columns, 64.0)
    cell_height = 26.0 if layout.pp <= 24 else 520 / layout.pp

    def parts() -> Iterator[str]:
        yield svg_text(left, 14, _describe_axes(layout), "soft small")
        for column in range(0, columns, layout.tp):
            copy, shard = divmod(column // layout.tp, layout.dp_shard)
            if layout.tp * cell_width >= 34:
                yield svg_text(left + column * cell_width, top - 8, f"{copy}.{shard}", "soft small")
        for row in rows:
            column = (row["dp_replicate"] * layout.dp_shard + row["dp_shard"]) * layout.tp + row["tp"]
            x, y = left + column * cell_width, top + row["pp"] * cell_height
            if column == 0:
                layers = f"layers {row['layers'] or 'none'}"
                yield svg_text(left - 8, y + cell_height * 0.65, layers, "soft small", "end")
            coordinate_text = ", ".join(f"{axis} {row[axis]}" for axis in ("pp", "dp_replicate", "dp_shard", "tp"))
            held = f"layers {row['layers']}, {format_count(row['parameters'])} parameters"
            tooltip = f"rank {row['rank']} ({coordinate_text}): {held}"
            # because: cuts of one layer lie beside each other, and in two depths they are told apart
            style = f"fill-opacity:{0.42 if (row['tp'] + row['dp_shard']) % 2 else 0.6}"
            yield svg_rect(x, y, cell_width - 1, cell_height - 1, f"r{row['pp'] % NUM_COLOURS} cell", tooltip, style)
            if cell_width >= 26 and cell_height >= 18:
                yield svg_text(x + cell_width / 2, y + cell_height * 0.65, str(row["rank"]), "small quiet", "middle")

    return svg_element(top + layout.pp * cell_height + 8, parts(), "which rank holds which layers")


def _describe_axes(layout: Layout) -> str:
    across = [f"copy.shard ({layout.dp_replicate} x {layout.dp_shard})"] * (layout.dp > 1)
    across += [f"{layout.tp} cuts (tp) side by side"] * (layout.tp > 1)
    return f"down: ranks of the pipeline; across: {', '.join(across) or 'one rank each'}"


def _layout_cells(row: dict[str, Any]) -> dict[str, str]:
    names = {
        "<rank": "rank", "pp": "pp", "replica": "dp_replicate", "shard": "dp_shard", "tp": "tp", "layers": "layers",
    }  # fmt: skip
    return (
        {name: str(row[key]) for name, key in names.items()}
        | {"parameters": format_count(row["parameters"])}
        | {name: format_bytes(row[key]) if row[key] else "-" for key, name in _BYTE_COLUMNS.items()}
    )


class Square(NamedTuple):
    """A square of a drawing that shows a value of each rank, placed by the rank's coordinate in the layout."""

    at: Coordinate
    share: float  # opacity of the colour, from 0 to 1
    hot: bool  # True: the colour for a slow rank
    shown: str  # text in the square, if it is large enough
    note: str  # tooltip


def draw_squares(squares: Sequence[Square], label: str) -> str:
    columns = sorted({(square.at.dp_replicate, square.at.dp_shard, square.at.tp) for square in squares})
    pp_ranks = sorted({square.at.pp for square in squares})
    left, top = 60.0, 24.0
    text_width = 7.0 * max(len(square.shown) for square in squares) + 4
    cell_width = min((WIDTH - left) / len(columns), max(text_width, 60.0))
    cell_height = min(26.0, max(520 / len(pp_ranks), 3.0))

    def parts() -> Iterator[str]:
        yield svg_text(left, 14, "across: copy, shard, cut (dp_replicate, dp_shard, tp); down: pp", "soft small")
        for number, pp in enumerate(pp_ranks):
            if number % math.ceil(14 / cell_height) == 0:
                yield svg_text(left - 8, top + (number + 0.7) * cell_height, f"pp {pp}", "soft small", "end")
        for square in squares:
            x = left + columns.index((square.at.dp_replicate, square.at.dp_shard, square.at.tp)) * cell_width
            y = top + pp_ranks.index(square.at.pp) * cell_height
            css_class = "heat hot" if square.hot else "heat"
            style = f"fill-opacity:{_MAX_OPACITY * square.share:.2f}"
            yield svg_rect(x, y, cell_width - 1, cell_height - 1, css_class, square.note, style)
            if cell_width >= text_width and cell_height >= 16:
                yield svg_text(x + cell_width / 2, y + cell_height * 0.68, square.shown, "small quiet", "middle")

    return svg_element(top + len(pp_ranks) * cell_height + 6, parts(), label)


# ---- a traced step ---------------------------------------------------------------------------------------------------


def trace_parts(run: RunFolder, title_suffix: str) -> Iterator[Part]:
    if not (run.path / TRACES).is_dir():
        return
    yield section_heading(f"A traced step{title_suffix}", anchor=f"trace{title_suffix}")
    try:
        timeline = merge_traces(run.path)
        segment = next((segment for segment in reversed(timeline.segments) if segment.steps), None)
        if segment is None:
            yield soft_paragraph("No step has been recorded to its end.")
        else:
            yield from _step_parts(segment, title_suffix)
        notes = [*timeline.notes, *(note for segment in timeline.segments for note in segment.notes)]
    except (LmtrainError, ArithmeticError, LookupError, OSError, ValueError) as error:
        notes = [f"The traces cannot be read: {shorten(error)}"]
    if notes:
        yield soft_paragraph(f"{join_few(notes, '; ')}.")


def _step_parts(segment: Segment, title_suffix: str) -> Iterator[Part]:
    # because: a step in which something is saved or measured takes many times a step's time
    is_slow = np.isin(segment.spans["kind"], (Kind.SAVE, Kind.VALIDATION, Kind.EVALUATION))
    ordinary_steps = sorted({*segment.steps} - {*np.unique(segment.spans["step"][is_slow]).tolist()})
    newest = (ordinary_steps or segment.steps)[-_NUM_STEPS:]
    left_out = ordinary_steps and {number for number in segment.steps if number > newest[0]} - {*newest}
    segment = replace(segment, spans=segment.spans[np.isin(segment.spans["step"], newest)])
    times, step = step_times(segment), newest[-1]
    means, waited = times.mean(), times.mean_waited()
    total_s = sum(means.values()) or 1.0
    steps = f"step{'s' * (len(newest) > 1)} {join_few(f'{number:,}' for number in newest)}"
    mean = f", mean of {len(times.ranks)} ranks" * (len(times.ranks) > 1)
    note = " Steps that save or measure are left out." * bool(left_out)
    yield soft_paragraph(f"Start {segment.start}, {steps}: {format_value(total_s, 'seconds')} each{mean}.{note}")
    yield html_table([
        {"<class": name, "time": format_value(means[name], "seconds"), "share": f"{means[name] / total_s:.1%}",
         "of it waiting": format_value(waited[name], "seconds") if waited[name] > 0 else ""}
        for name in CLASSES if means[name] > 0
    ])  # fmt: skip
    heats = rank_heat(segment, times)
    if len(heats) > 1:
        hottest = max(heats, key=lambda heat: heat.ratio if heat.ratio == heat.ratio else 0.0)
        yield (
            "<h3>Own work of each rank</h3>"
            + soft_paragraph(
                "Forward, backward and update, beside the ranks that hold the same stages. The slowest is rank "
                f"{hottest.rank} on {hottest.host}: {hottest.ratio:.2f} of the median."
            )
        )
        yield Picture(f"heat{title_suffix}", draw_own_work(heats))
    rows = select_bars(segment, all_rows := timeline_rows(segment, step))
    yield f"<h3>What ran when in step {step:,}</h3>"
    if sentence := _describe_left_out(rows, all_rows):
        yield soft_paragraph(sentence)
    yield Picture(f"timeline{title_suffix}", draw_timeline(rows))
    data: dict[str, Any] = {
        "step": step,
        "heat": [
            [heat.rank, heat.host, _rounded_or_none(heat.own_work_s), _rounded_or_none(heat.ratio)] for heat in heats
        ],
        "bars": [
            [row.rank, row.stage, bar.what, bar.microbatch, _rounded_or_none(bar.begin_s), _rounded_or_none(bar.end_s)]
            for row in rows
            for bar in row.bars
        ],
    }
    plain = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    yield json_element(plain, f"trace-data{title_suffix}")


def _rounded_or_none(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def draw_own_work(heats: Sequence[Heat]) -> str:
    """Return an SVG of the layout with a square for each rank: the longer it computes (waits not counted), compared
    with the median of ranks with the same pipeline stages, the darker.
    """
    squares = []
    for heat in heats:
        is_known = math.isfinite(heat.ratio)
        comparison = f"{heat.ratio:.3f} of the median" if is_known else "no whole step was recorded"
        tooltip = f"rank {heat.rank} on {heat.host}: {format_value(heat.own_work_s, 'seconds')}, {comparison}"
        share = min(max((heat.ratio - 0.9) / 0.3, 0.06), 1.0) if is_known else 0.0
        squares.append(Square(heat.at, share, heat.ratio > 1.05, f"{heat.ratio:.2f}" if is_known else "-", tooltip))
    return draw_squares(squares, "own work of each rank, beside the median of its like")


def select_bars(segment: Segment, rows: Sequence[TimelineRow]) -> list[TimelineRow]:
    """Return the rows of the timeline to draw: those of the first 24 ranks, with only the 4,000 longest of all their
    bars, so that the page stays small. With a pipeline, the ranks are those of its first replica.
    """
    coordinates = {rank: segment.layout.coordinate(rank) for rank in sorted({row.rank for row in rows})}
    ranks = [*coordinates]
    if segment.layout.pp > 1:
        ranks = [rank for rank, c in coordinates.items() if not (c.dp_replicate or c.dp_shard or c.tp)]
    kept = [row for row in rows if row.rank in set(ranks[:_MAX_TIMELINE_RANKS])]
    lengths = sorted((bar.end_s - bar.begin_s for row in kept for bar in row.bars), reverse=True)
    min_length = lengths[_MAX_BARS] if len(lengths) > _MAX_BARS else -1.0
    return [replace(row, bars=tuple(bar for bar in row.bars if bar.end_s - bar.begin_s > min_length)) for row in kept]


def _describe_left_out(rows: Sequence[TimelineRow], all_rows: Sequence[TimelineRow]) -> str:
    """Return a sentence such as "Shown: 24 of 64 ranks" if the drawn `rows` lack ranks or bars that `all_rows` have; ""
    if they lack none.
    """
    shown, ranks = {row.rank for row in rows}, {row.rank for row in all_rows}
    num_shown = sum(len(row.bars) for row in rows)
    num_bars = sum(len(row.bars) for row in all_rows if row.rank in shown)
    shown_parts = [f"{len(shown)} of {len(ranks)} ranks"] * (len(shown) < len(ranks))
    shown_parts += [f"the longest {num_shown:,} of their {num_bars:,} bars"] * (num_shown < num_bars)
    return f"Shown: {' and '.join(shown_parts)}; `lmtrain trace` writes all of them." if shown_parts else ""


def draw_timeline(rows: Sequence[TimelineRow]) -> str:
    ranks = sorted({row.rank for row in rows})
    end = max((bar.end_s for row in rows for bar in row.bars), default=1.0)
    left, top = 70.0, 26.0
    row_height = min(26.0, max(420 / max(len(ranks), 1), 8.0))
    scale = (WIDTH - left - 8) / end
    drawn = {bar.what for row in rows for bar in row.bars}

    def parts() -> Iterator[str]:
        yield from svg_legend([(f"t-{kind}", name) for kind, name in _BAR_NAMES.items() if kind in drawn], left)
        for number, rank in enumerate(ranks):
            y = top + number * row_height
            yield svg_text(left - 8, y + row_height * 0.7, f"rank {rank}", "soft small", "end")
            yield svg_rect(left, y, end * scale, row_height - 2, "idle")
        for row in rows:
            y = top + ranks.index(row.rank) * row_height
            for bar in row.bars:
                seconds, stage, microbatch = bar.end_s - bar.begin_s, row.stage, bar.microbatch
                details = f", stage {stage}" * (stage >= 0) + f", microbatch {microbatch}" * (microbatch >= 0)
                tooltip = f"{_BAR_NAMES.get(bar.what, bar.what)}{details}: {format_value(seconds, 'seconds')}"
                if bar.what != "bubble":
                    x, width = left + bar.begin_s * scale, seconds * scale
                    yield svg_rect(x, y, width, row_height - 2, f"t-{bar.what}", tooltip)
        bottom = top + len(ranks) * row_height
        tick_values = ticks(0.0, end, 8, "seconds")
        for value, label in zip(tick_values, tick_labels(tick_values, "seconds"), strict=True):
            yield svg_line(left + value * scale, bottom, left + value * scale, bottom + 4, "grid")
            yield svg_text(left + value * scale, bottom + 17, label, "soft small", "middle")

    return svg_element(top + len(ranks) * row_height + 24, parts(), "what each rank did when in the step")


# ---- kernels ---------------------------------------------------------------------------------------------------------


def kernel_parts(run: RunFolder, title_suffix: str) -> Iterator[Part]:
    if not (run.path / _PROFILE_FOLDER).is_dir():
        return
    yield section_heading(f"Kernels{title_suffix}", anchor=f"kernels{title_suffix}")
    try:
        yield from _kernel_parts(run, title_suffix)
    except (LmtrainError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        yield soft_paragraph(f"They cannot be read: {shorten(error)}")


def _kernel_parts(run: RunFolder, title_suffix: str) -> Iterator[Part]:
    tables = read_tables(run.path / _PROFILE_FOLDER)
    if len(tables) > _MAX_KERNEL_TABLES:
        yield soft_paragraph(
            f"Shown: {_MAX_KERNEL_TABLES} of {len(tables)} profiles, of the newest window and the lowest ranks first; "
            f"the others lie in {_PROFILE_FOLDER}."
        )
    for table in sorted(tables, key=lambda table: (-table.first_step, table.rank))[:_MAX_KERNEL_TABLES]:
        yield f"<h3>Steps {table.first_step:,} to {table.last_step:,}, rank {table.rank}</h3>"
        note = f"; the {_MAX_KERNELS} kernels that took longest" * (len(table.kernels) > _MAX_KERNELS)
        yield soft_paragraph(f"On {table.device}, {format_value(table.window_s, 'seconds')} by the clock{note}.")
        name = f"kernels_{table.first_step}-{table.last_step}_rank_{table.rank}{title_suffix}"
        yield Picture(name, draw_kernel_classes(table))
        yield html_table([
            {"<kernel": kernel.name, "<class": kernel.kind, "time": format_value(kernel.seconds, "seconds"),
             "of the window": f"{kernel.seconds / (table.window_s or 1.0):.1%}", "calls": f"{kernel.calls:,}"}
            for kernel in table.kernels[:_MAX_KERNELS]
        ])  # fmt: skip


def draw_kernel_classes(table: KernelTable) -> str:
    """Return an SVG of one bar, divided by the share of time that each class of GPU kernels took (matrix products,
    attention, collectives, ...).
    """
    total = sum(table.classes.values()) or 1.0
    timed = [(name, seconds) for name, seconds in table.classes.items() if seconds > 0]

    def parts() -> Iterator[str]:
        yield from svg_legend([(f"r{number % NUM_COLOURS}", name) for number, (name, _) in enumerate(timed)], 0.0)
        x = 0.0
        for number, (name, seconds) in enumerate(timed):
            bar_width = seconds / total * WIDTH
            tooltip = f"{name}: {format_value(seconds, 'seconds')}, {seconds / total:.1%}"
            yield svg_rect(x, 24, bar_width - 1, 22, f"r{number % NUM_COLOURS}", tooltip)
            x += bar_width

    return svg_element(50, parts(), "time of kernels by class")
