"""What a report shows of every rank: its place in the layout, its memory, a traced step, its kernels.

A square for each rank stands by its place in the layout: down the pipeline, across copies, shards and cuts. Of a traced
step it says where the time went, how long each rank's own work took, and what ran when; the numbers are
observe/timeline's, and stand in the page as JSON too, as they are drawn. Called by report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lmtrain.config.build import build_settings
from lmtrain.errors import LmtrainError, join_few, shorten
from lmtrain.layout import Coordinate, Layout
from lmtrain.observe.history.record import Record
from lmtrain.observe.profile.kernels import KernelTable, read_tables
from lmtrain.observe.spans.format import Kind
from lmtrain.observe.timeline.merge import Segment, merge_traces
from lmtrain.observe.timeline.step_time import CLASSES, Heat, TimelineRow, rank_heat, step_times, timeline_rows
from lmtrain.page.chart import format_value, tick_labels, ticks
from lmtrain.page.document import (
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
from lmtrain.runfolder.folder import RunFolder
from lmtrain.runfolder.names import TRACES
from lmtrain.train.config import RunConfig
from lmtrain.train.layouts.layout_table import layout_words, rank_rows
from lmtrain.train.layouts.layout_table import merge_rows as merged_rows
from lmtrain.units import format_bytes, format_count

_LEAST = 0.06  # how dark the emptiest is
_DARKEST = 0.6  # because: the number in it must be readable, in light and in dark
_MOST_CELLS = 4096
_MOST_ROWS = 64
_HEADS = {
    "weights_bytes": "weights", "masters_bytes": "masters", "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
}  # fmt: skip
_UNREADABLE = (LmtrainError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_STEPS = 4  # the newest of them make the tables
_LANES = 24
_FOLDER = "profile"
_MOST_TABLES = 4
_MOST_KERNELS = 15
_MOST_BARS = 4000
_COLOURS = {
    "forward": "forward", "backward": "backward", "input": "backward for inputs", "weight": "weights' gradients",
    "compute": "other work", "pp": "messages", "dp": "dp", "tp": "tp", "world": "all ranks", "bubble": "waiting",
    "data": "data", "optimizer": "optimizer", "save": "save", "measuring": "measuring", "other": "other",
}  # fmt: skip


def memory_parts(seen: RunFolder, record: Record, whose: str) -> Iterator[Part]:
    layout, (step, peaks) = _layout(seen), newest_peaks(record)
    if layout is None or len(peaks) != layout.world_size:  # because: it was another one that wrote them
        return
    fullest, least = max(peaks), min(peaks)
    yield section_heading(
        f"Memory of each rank{whose}",
        f"The most that each has held, as told by step {step:,}: the peak on the GPU, or what the process has resident "
        f"on a CPU. Rank {peaks.index(fullest)} holds most, {format_bytes(fullest)}; rank {peaks.index(least)} least, "
        f"{format_bytes(least)}.",
        f"memory{whose}",
    )
    yield Picture(f"memory{whose}", memory_picture(layout, peaks))
    yield json_element(json.dumps({"step": step, "peak_bytes": peaks}, separators=(",", ":")), f"memory-data{whose}")


def newest_peaks(record: Record) -> tuple[int, list[int]]:
    """Return the step of the newest memory row and its bytes by rank; (0, []) if no row can be used."""
    rows, starts = record.rows.get("memory", []), record.rows.get("start", [])
    if not rows or (starts and rows[-1].get("attempt") != starts[-1].get("attempt")):
        return 0, []
    peaks = rows[-1].get("peak_bytes")
    if not (isinstance(peaks, list) and any(peaks) and all(type(p) is int and 0 <= p < 1 << 60 for p in peaks)):
        return 0, []
    return rows[-1]["step"], peaks


def memory_picture(layout: Layout, peaks: Sequence[int]) -> str:
    """Draw the ranks' peak memory: the darker, the fuller."""
    fullest = max(peaks)
    found = []
    for rank, peak in enumerate(peaks):
        at, share = layout.coordinate(rank), peak / fullest
        said = f"rank {rank}: {format_bytes(peak)}, {share:.1%} of the fullest"
        # because: ranks of a run differ by parts, not by orders
        found.append(Square(at, max(2 * share - 1, _LEAST), False, format_bytes(peak), said))
    return squares(found, "memory of each rank")


def _layout(seen: RunFolder) -> Layout | None:
    try:
        return build_settings(RunConfig, seen.settings).parallel.layout
    except _UNREADABLE:
        return None  # because: what is wrong with them is said where the layout is drawn


def layout_parts(seen: RunFolder, whose: str) -> Iterator[Part]:
    if not seen.settings:
        return
    try:
        config = build_settings(RunConfig, seen.settings)
        rows = rank_rows(config, config.model)
    except _UNREADABLE as error:
        yield section_heading(f"Layout{whose}", anchor=f"layout{whose}")
        yield soft_paragraph(f"It cannot be told from these settings: {shorten(error)}")
        return
    yield section_heading(f"Layout{whose}", layout_words(config.parallel), f"layout{whose}")
    if 1 < len(rows) <= _MOST_CELLS:
        yield Picture(f"layout{whose}", layout_picture(config, rows))
    elif len(rows) > 1:
        yield soft_paragraph(f"Not drawn: {len(rows):,} ranks are more than the {_MOST_CELLS:,} that a page shows.")
    alike = merged_rows(rows)
    if len(alike) > _MOST_ROWS:
        yield soft_paragraph(f"Shown: the first {_MOST_ROWS} of {len(alike):,} rows.")
    yield html_table([_row(row) for row in alike[:_MOST_ROWS]])


def layout_picture(config: RunConfig, rows: Sequence[dict[str, Any]]) -> str:
    """Draw the layout: a row for each pipeline rank, a column for each replica, shard and tp rank."""
    layout = config.parallel.layout
    columns = layout.dp_replicate * layout.dp_shard * layout.tp
    left, top = 96.0, 44.0
    wide = min((WIDTH - left) / columns, 64.0)
    high = 26.0 if layout.pp <= 24 else 520 / layout.pp

    def parts() -> Iterator[str]:
        yield svg_text(left, 14, _axes(layout), "soft small")
        for column in range(0, columns, layout.tp):
            copy, shard = divmod(column // layout.tp, layout.dp_shard)
            if layout.tp * wide >= 34:
                yield svg_text(left + column * wide, top - 8, f"{copy}.{shard}", "soft small")
        for row in rows:
            column = (row["dp_replicate"] * layout.dp_shard + row["dp_shard"]) * layout.tp + row["tp"]
            x, y = left + column * wide, top + row["pp"] * high
            if column == 0:
                yield svg_text(left - 8, y + high * 0.65, f"layers {row['layers'] or 'none'}", "soft small", "end")
            at = ", ".join(f"{axis} {row[axis]}" for axis in ("pp", "dp_replicate", "dp_shard", "tp"))
            said = f"rank {row['rank']} ({at}): layers {row['layers']}, {format_count(row['parameters'])} parameters"
            # because: cuts of one layer lie beside each other, and in two depths they are told apart
            shade = f"fill-opacity:{0.42 if (row['tp'] + row['dp_shard']) % 2 else 0.6}"
            yield svg_rect(x, y, wide - 1, high - 1, f"r{row['pp'] % NUM_COLOURS} cell", said, shade)
            if wide >= 26 and high >= 18:
                yield svg_text(x + wide / 2, y + high * 0.65, str(row["rank"]), "small quiet", "middle")

    return svg_element(top + layout.pp * high + 8, parts(), "which rank holds which layers")


def _axes(layout: Layout) -> str:
    across = [f"copy.shard ({layout.dp_replicate} x {layout.dp_shard})"] * (layout.dp > 1)
    across += [f"{layout.tp} cuts (tp) side by side"] * (layout.tp > 1)
    return f"down: ranks of the pipeline; across: {', '.join(across) or 'one rank each'}"


def _row(row: dict[str, Any]) -> dict[str, str]:
    names = {
        "<rank": "rank", "pp": "pp", "replica": "dp_replicate", "shard": "dp_shard", "tp": "tp", "layers": "layers",
    }  # fmt: skip
    return (
        {name: str(row[key]) for name, key in names.items()}
        | {"parameters": format_count(row["parameters"])}
        | {name: format_bytes(row[key]) if row[key] else "-" for key, name in _HEADS.items()}
    )


class Square(NamedTuple):
    at: Coordinate
    share: float  # how dark it is, from 0 to 1
    hot: bool
    shown: str  # in it, where there is room
    note: str


def squares(found: Sequence[Square], label: str) -> str:
    across = sorted({(one.at.dp_replicate, one.at.dp_shard, one.at.tp) for one in found})
    down = sorted({one.at.pp for one in found})
    left, top = 60.0, 24.0
    room = 7.0 * max(len(one.shown) for one in found) + 4
    wide = min((WIDTH - left) / len(across), max(room, 60.0))
    high = min(26.0, max(520 / len(down), 3.0))

    def parts() -> Iterator[str]:
        yield svg_text(left, 14, "across: copy, shard, cut (dp_replicate, dp_shard, tp); down: pp", "soft small")
        for number, pp in enumerate(down):
            if number % math.ceil(14 / high) == 0:
                yield svg_text(left - 8, top + number * high + high * 0.7, f"pp {pp}", "soft small", "end")
        for one in found:
            x = left + across.index((one.at.dp_replicate, one.at.dp_shard, one.at.tp)) * wide
            y = top + down.index(one.at.pp) * high
            kind = "heat hot" if one.hot else "heat"
            yield svg_rect(x, y, wide - 1, high - 1, kind, one.note, f"fill-opacity:{_DARKEST * one.share:.2f}")
            if wide >= room and high >= 16:
                yield svg_text(x + wide / 2, y + high * 0.68, one.shown, "small quiet", "middle")

    return svg_element(top + len(down) * high + 6, parts(), label)


# ---- a traced step ---------------------------------------------------------------------------------------------------


def trace_parts(seen: RunFolder, whose: str) -> Iterator[Part]:
    if not (seen.path / TRACES).is_dir():
        return
    yield section_heading(f"A traced step{whose}", anchor=f"trace{whose}")
    try:
        found = merge_traces(seen.path)
        segment = next((one for one in reversed(found.segments) if one.steps), None)
        if segment is None:
            yield soft_paragraph("No step has been recorded to its end.")
        else:
            yield from _parts(segment, whose)
        notes = [*found.notes, *(note for one in found.segments for note in one.notes)]
    except (LmtrainError, ArithmeticError, LookupError, OSError, ValueError) as error:
        notes = [f"The traces cannot be read: {shorten(error)}"]
    if notes:
        yield soft_paragraph(f"{join_few(notes, '; ')}.")


def _parts(segment: Segment, whose: str) -> Iterator[Part]:
    # because: a step in which something is saved or measured takes many times a step's time
    longer = np.isin(segment.spans["kind"], (Kind.SAVE, Kind.VALIDATION, Kind.EVALUATION))
    usual = sorted({*segment.steps} - {*np.unique(segment.spans["step"][longer]).tolist()})
    newest = (usual or segment.steps)[-_STEPS:]
    left_out = usual and {one for one in segment.steps if one > newest[0]} - {*newest}
    segment = replace(segment, spans=segment.spans[np.isin(segment.spans["step"], newest)])
    times, step = step_times(segment), newest[-1]
    means, waited = times.mean(), times.mean_waited()
    whole = sum(means.values()) or 1.0
    steps = f"step{'s' * (len(newest) > 1)} {join_few(f'{one:,}' for one in newest)}"
    mean = f", mean of {len(times.ranks)} ranks" * (len(times.ranks) > 1)
    few = " Steps that save or measure are left out." * bool(left_out)
    yield soft_paragraph(f"Start {segment.start}, {steps}: {format_value(whole, 'seconds')} each{mean}.{few}")
    yield html_table([
        {"<class": name, "time": format_value(means[name], "seconds"), "share": f"{means[name] / whole:.1%}",
         "of it waiting": format_value(waited[name], "seconds") if waited[name] > 0 else ""}
        for name in CLASSES if means[name] > 0
    ])  # fmt: skip
    ranks = rank_heat(segment, times)
    if len(ranks) > 1:
        hottest = max(ranks, key=lambda one: one.ratio if one.ratio == one.ratio else 0.0)
        yield (
            "<h3>Own work of each rank</h3>"
            + soft_paragraph(
                "Forward, backward and update, beside the ranks that hold the same stages. The slowest is rank "
                f"{hottest.rank} on {hottest.host}: {hottest.ratio:.2f} of the median."
            )
        )
        yield Picture(f"heat{whose}", heat_picture(ranks))
    rows = shown_rows(segment, every := timeline_rows(segment, step))
    yield f"<h3>What ran when in step {step:,}</h3>"
    if cut := _cut(rows, every):
        yield soft_paragraph(cut)
    yield Picture(f"timeline{whose}", timeline_picture(rows))
    data: dict[str, Any] = {
        "step": step,
        "heat": [[one.rank, one.host, _number(one.own_work_s), _number(one.ratio)] for one in ranks],
        "bars": [
            [row.rank, row.stage, bar.what, bar.microbatch, _number(bar.begin_s), _number(bar.end_s)]
            for row in rows
            for bar in row.bars
        ],
    }
    plain = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    yield json_element(plain, f"trace-data{whose}")


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def heat_picture(ranks: Sequence[Heat]) -> str:
    """Draw the ranks' own work: the darker, the slower beside ranks with the same work."""
    found = []
    for one in ranks:
        known = math.isfinite(one.ratio)
        beside = f"{one.ratio:.3f} of the median" if known else "no whole step was recorded"
        said = f"rank {one.rank} on {one.host}: {format_value(one.own_work_s, 'seconds')}, {beside}"
        share = min(max((one.ratio - 0.9) / 0.3, 0.06), 1.0) if known else 0.0
        found.append(Square(one.at, share, one.ratio > 1.05, f"{one.ratio:.2f}" if known else "-", said))
    return squares(found, "own work of each rank, beside the median of its like")


def shown_rows(segment: Segment, rows: Sequence[TimelineRow]) -> list[TimelineRow]:
    """Return the longest bars of each rank of one pipeline, or of the first ranks, as many as a page holds."""
    places = {one: segment.coordinate(one) for one in sorted({row.rank for row in rows})}
    ranks = [*places]
    if segment.layout.pp > 1:
        ranks = [rank for rank, at in places.items() if not (at.dp_replicate or at.dp_shard or at.tp)]
    kept = [row for row in rows if row.rank in set(ranks[:_LANES])]
    lengths = sorted((bar.end_s - bar.begin_s for row in kept for bar in row.bars), reverse=True)
    least = lengths[_MOST_BARS] if len(lengths) > _MOST_BARS else -1.0
    return [replace(row, bars=tuple(bar for bar in row.bars if bar.end_s - bar.begin_s > least)) for row in kept]


def _cut(rows: Sequence[TimelineRow], every: Sequence[TimelineRow]) -> str:
    """Return in words what the picture does not show."""
    shown, ranks = {row.rank for row in rows}, {row.rank for row in every}
    num_shown = sum(len(row.bars) for row in rows)
    num_bars = sum(len(row.bars) for row in every if row.rank in shown)
    few = [f"{len(shown)} of {len(ranks)} ranks"] * (len(shown) < len(ranks))
    few += [f"the longest {num_shown:,} of their {num_bars:,} bars"] * (num_shown < num_bars)
    return f"Shown: {' and '.join(few)}; `lmtrain trace` writes all of them." if few else ""


def timeline_picture(rows: Sequence[TimelineRow]) -> str:
    ranks = sorted({row.rank for row in rows})
    end = max((bar.end_s for row in rows for bar in row.bars), default=1.0)
    left, top = 70.0, 26.0
    high = min(26.0, max(420 / max(len(ranks), 1), 8.0))
    scale = (WIDTH - left - 8) / end
    used = {bar.what for row in rows for bar in row.bars}

    def parts() -> Iterator[str]:
        yield from svg_legend([(f"t-{kind}", name) for kind, name in _COLOURS.items() if kind in used], left)
        for number, rank in enumerate(ranks):
            y = top + number * high
            yield svg_text(left - 8, y + high * 0.7, f"rank {rank}", "soft small", "end")
            yield svg_rect(left, y, end * scale, high - 2, "idle")
        for row in rows:
            y = top + ranks.index(row.rank) * high
            for bar in row.bars:
                long, stage, microbatch = bar.end_s - bar.begin_s, row.stage, bar.microbatch
                of = f", stage {stage}" * (stage >= 0) + f", microbatch {microbatch}" * (microbatch >= 0)
                said = f"{_COLOURS.get(bar.what, bar.what)}{of}: {format_value(long, 'seconds')}"
                if bar.what != "bubble":
                    yield svg_rect(left + bar.begin_s * scale, y, long * scale, high - 2, f"t-{bar.what}", said)
        bottom = top + len(ranks) * high
        along = ticks(0.0, end, 8, "seconds")
        for value, word in zip(along, tick_labels(along, "seconds"), strict=True):
            yield svg_line(left + value * scale, bottom, left + value * scale, bottom + 4, "grid")
            yield svg_text(left + value * scale, bottom + 17, word, "soft small", "middle")

    return svg_element(top + len(ranks) * high + 24, parts(), "what each rank did when in the step")


# ---- kernels ---------------------------------------------------------------------------------------------------------


def kernel_parts(seen: RunFolder, whose: str) -> Iterator[Part]:
    if not (seen.path / _FOLDER).is_dir():
        return
    yield section_heading(f"Kernels{whose}", anchor=f"kernels{whose}")
    try:
        yield from _kernel_parts(seen, whose)
    except (LmtrainError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        yield soft_paragraph(f"They cannot be read: {shorten(error)}")


def _kernel_parts(seen: RunFolder, whose: str) -> Iterator[Part]:
    tables = read_tables(seen.path / _FOLDER)
    if len(tables) > _MOST_TABLES:
        yield soft_paragraph(
            f"Shown: {_MOST_TABLES} of {len(tables)} profiles, of the newest window and the lowest ranks first; "
            f"the others lie in {_FOLDER}."
        )
    for one in sorted(tables, key=lambda one: (-one.first_step, one.rank))[:_MOST_TABLES]:
        yield f"<h3>Steps {one.first_step:,} to {one.last_step:,}, rank {one.rank}</h3>"
        few = f"; the {_MOST_KERNELS} kernels that took longest" * (len(one.kernels) > _MOST_KERNELS)
        yield soft_paragraph(f"On {one.device}, {format_value(one.window_s, 'seconds')} by the clock{few}.")
        yield Picture(f"kernels_{one.first_step}-{one.last_step}_rank_{one.rank}{whose}", class_bar(one))
        yield html_table([
            {"<kernel": kernel.name, "<class": kernel.kind, "time": format_value(kernel.seconds, "seconds"),
             "of the window": f"{kernel.seconds / (one.window_s or 1.0):.1%}", "calls": f"{kernel.calls:,}"}
            for kernel in one.kernels[:_MOST_KERNELS]
        ])  # fmt: skip


def class_bar(one: KernelTable) -> str:
    """Draw the classes side by side, as long as they took."""
    total = sum(one.classes.values()) or 1.0
    used = [(name, seconds) for name, seconds in one.classes.items() if seconds > 0]

    def parts() -> Iterator[str]:
        yield from svg_legend([(f"r{at % NUM_COLOURS}", name) for at, (name, _) in enumerate(used)], 0.0)
        x = 0.0
        for at, (name, seconds) in enumerate(used):
            wide = seconds / total * WIDTH
            said = f"{name}: {format_value(seconds, 'seconds')}, {seconds / total:.1%}"
            yield svg_rect(x, 24, wide - 1, 22, f"r{at % NUM_COLOURS}", said)
            x += wide

    return svg_element(50, parts(), "time of kernels by class")
