"""A traced step in a report: where its time went, how long each rank's own work took, and what ran when.

Called by report_page. The numbers are observe/timeline's; they also stand in the page as JSON, as they are drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmtrain.cli.report.ranks import Square, squares
from lmtrain.errors import LmtrainError, a_few, brief
from lmtrain.observe.profile.kernels import KernelTable, read_tables
from lmtrain.observe.spans.format import Kind
from lmtrain.observe.timeline.merge import Segment, merged
from lmtrain.observe.timeline.step_time import CLASSES, Heat, Row, heat, step_times, timeline_rows
from lmtrain.page.chart import labels, ticks, written
from lmtrain.page.document import (
    NUM_COLOURS,
    WIDTH,
    Part,
    Picture,
    data_element,
    legend,
    line,
    paragraph,
    rect,
    section,
    svg,
    table,
    text,
)
from lmtrain.runfolder.folder import Seen
from lmtrain.runfolder.names import TRACES

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


def trace_parts(seen: Seen, whose: str) -> Iterator[Part]:
    if not (seen.path / TRACES).is_dir():
        return
    yield section(f"A traced step{whose}", name=f"trace{whose}")
    try:
        found = merged(seen.path)
        segment = next((one for one in reversed(found.segments) if one.steps), None)
        if segment is None:
            yield paragraph("No step has been recorded to its end.")
        else:
            yield from _parts(segment, whose)
        notes = [*found.notes, *(note for one in found.segments for note in one.notes)]
    except (LmtrainError, ArithmeticError, LookupError, OSError, ValueError) as error:
        notes = [f"The traces cannot be read: {brief(error)}"]
    if notes:
        yield paragraph(f"{a_few(notes, '; ')}.")


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
    steps = f"step{'s' * (len(newest) > 1)} {a_few(f'{one:,}' for one in newest)}"
    mean = f", mean of {len(times.ranks)} ranks" * (len(times.ranks) > 1)
    few = " Steps that save or measure are left out." * bool(left_out)
    yield paragraph(f"Start {segment.start}, {steps}: {written(whole, 'seconds')} each{mean}.{few}")
    yield table([
        {"<class": name, "time": written(means[name], "seconds"), "share": f"{means[name] / whole:.1%}",
         "of it waiting": written(waited[name], "seconds") if waited[name] > 0 else ""}
        for name in CLASSES if means[name] > 0
    ])  # fmt: skip
    ranks = heat(segment, times)
    if len(ranks) > 1:
        hottest = max(ranks, key=lambda one: one.ratio if one.ratio == one.ratio else 0.0)
        yield (
            "<h3>Own work of each rank</h3>"
            + paragraph(
                "Forward, backward and update, beside the ranks that hold the same stages. The slowest is rank "
                f"{hottest.rank} on {hottest.host}: {hottest.ratio:.2f} of the median."
            )
        )
        yield Picture(f"heat{whose}", heat_picture(ranks))
    rows = shown_rows(segment, every := timeline_rows(segment, step))
    yield f"<h3>What ran when in step {step:,}</h3>"
    if cut := _cut(rows, every):
        yield paragraph(cut)
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
    yield data_element(plain, f"trace-data{whose}")


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def heat_picture(ranks: Sequence[Heat]) -> str:
    """The darker, the slower than its like."""
    found = []
    for one in ranks:
        known = math.isfinite(one.ratio)
        beside = f"{one.ratio:.3f} of the median" if known else "no whole step was recorded"
        said = f"rank {one.rank} on {one.host}: {written(one.own_work_s, 'seconds')}, {beside}"
        share = min(max((one.ratio - 0.9) / 0.3, 0.06), 1.0) if known else 0.0
        found.append(Square(one.at, share, one.ratio > 1.05, f"{one.ratio:.2f}" if known else "-", said))
    return squares(found, "own work of each rank, beside the median of its like")


def shown_rows(segment: Segment, rows: Sequence[Row]) -> list[Row]:
    """Of each rank of one pipeline, or of the first ranks: the longest bars, of which a page holds some thousands."""
    places = {one: segment.at(one) for one in sorted({row.rank for row in rows})}
    ranks = [*places]
    if segment.layout.pp > 1:
        ranks = [rank for rank, at in places.items() if not (at.dp_replicate or at.dp_shard or at.tp)]
    kept = [row for row in rows if row.rank in set(ranks[:_LANES])]
    lengths = sorted((bar.end_s - bar.begin_s for row in kept for bar in row.bars), reverse=True)
    least = lengths[_MOST_BARS] if len(lengths) > _MOST_BARS else -1.0
    return [replace(row, bars=tuple(bar for bar in row.bars if bar.end_s - bar.begin_s > least)) for row in kept]


def _cut(rows: Sequence[Row], every: Sequence[Row]) -> str:
    """What the picture does not show."""
    shown, ranks = {row.rank for row in rows}, {row.rank for row in every}
    num_shown = sum(len(row.bars) for row in rows)
    num_bars = sum(len(row.bars) for row in every if row.rank in shown)
    few = [f"{len(shown)} of {len(ranks)} ranks"] * (len(shown) < len(ranks))
    few += [f"the longest {num_shown:,} of their {num_bars:,} bars"] * (num_shown < num_bars)
    return f"Shown: {' and '.join(few)}; `lmtrain trace` writes all of them." if few else ""


def timeline_picture(rows: Sequence[Row]) -> str:
    ranks = sorted({row.rank for row in rows})
    end = max((bar.end_s for row in rows for bar in row.bars), default=1.0)
    left, top = 70.0, 26.0
    high = min(26.0, max(420 / max(len(ranks), 1), 8.0))
    scale = (WIDTH - left - 8) / end
    used = {bar.what for row in rows for bar in row.bars}

    def parts() -> Iterator[str]:
        yield from legend([(f"t-{kind}", name) for kind, name in _COLOURS.items() if kind in used], left)
        for number, rank in enumerate(ranks):
            y = top + number * high
            yield text(left - 8, y + high * 0.7, f"rank {rank}", "soft small", "end")
            yield rect(left, y, end * scale, high - 2, "idle")
        for row in rows:
            y = top + ranks.index(row.rank) * high
            for bar in row.bars:
                long, stage, microbatch = bar.end_s - bar.begin_s, row.stage, bar.microbatch
                of = f", stage {stage}" * (stage >= 0) + f", microbatch {microbatch}" * (microbatch >= 0)
                said = f"{_COLOURS.get(bar.what, bar.what)}{of}: {written(long, 'seconds')}"
                if bar.what != "bubble":
                    yield rect(left + bar.begin_s * scale, y, long * scale, high - 2, f"t-{bar.what}", said)
        bottom = top + len(ranks) * high
        along = ticks(0.0, end, 8, "seconds")
        for value, word in zip(along, labels(along, "seconds"), strict=True):
            yield line(left + value * scale, bottom, left + value * scale, bottom + 4, "grid")
            yield text(left + value * scale, bottom + 17, word, "soft small", "middle")

    return svg(top + len(ranks) * high + 24, parts(), "what each rank did when in the step")


def kernel_parts(seen: Seen, whose: str) -> Iterator[Part]:
    if not (seen.path / _FOLDER).is_dir():
        return
    yield section(f"Kernels{whose}", name=f"kernels{whose}")
    try:
        yield from _kernel_parts(seen, whose)
    except (LmtrainError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        yield paragraph(f"They cannot be read: {brief(error)}")


def _kernel_parts(seen: Seen, whose: str) -> Iterator[Part]:
    tables = read_tables(seen.path / _FOLDER)
    if len(tables) > _MOST_TABLES:
        yield paragraph(
            f"Shown: {_MOST_TABLES} of {len(tables)} profiles, of the newest window and the lowest ranks first; "
            f"the others lie in {_FOLDER}."
        )
    for one in sorted(tables, key=lambda one: (-one.first_step, one.rank))[:_MOST_TABLES]:
        yield f"<h3>Steps {one.first_step:,} to {one.last_step:,}, rank {one.rank}</h3>"
        few = f"; the {_MOST_KERNELS} kernels that took longest" * (len(one.kernels) > _MOST_KERNELS)
        yield paragraph(f"On {one.device}, {written(one.window_s, 'seconds')} by the clock{few}.")
        yield Picture(f"kernels_{one.first_step}-{one.last_step}_rank_{one.rank}{whose}", class_bar(one))
        yield table([
            {"<kernel": kernel.name, "<class": kernel.kind, "time": written(kernel.seconds, "seconds"),
             "of the window": f"{kernel.seconds / (one.window_s or 1.0):.1%}", "calls": f"{kernel.calls:,}"}
            for kernel in one.kernels[:_MOST_KERNELS]
        ])  # fmt: skip


def class_bar(one: KernelTable) -> str:
    """The classes side by side, as long as they took."""
    total = sum(one.classes.values()) or 1.0
    used = [(name, seconds) for name, seconds in one.classes.items() if seconds > 0]

    def parts() -> Iterator[str]:
        yield from legend([(f"r{at % NUM_COLOURS}", name) for at, (name, _) in enumerate(used)], 0.0)
        x = 0.0
        for at, (name, seconds) in enumerate(used):
            wide = seconds / total * WIDTH
            said = f"{name}: {written(seconds, 'seconds')}, {seconds / total:.1%}"
            yield rect(x, 24, wide - 1, 22, f"r{at % NUM_COLOURS}", said)
            x += wide

    return svg(50, parts(), "time of kernels by class")
