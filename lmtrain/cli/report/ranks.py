"""A square for each rank of a run, by its place in the layout: down the pipeline, across copies, shards and cuts.

Called by what a report shows of every rank: its own work, its memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lmtrain.config.build import build_settings
from lmtrain.errors import LmtrainError, brief
from lmtrain.layout import Coordinate, Layout
from lmtrain.observe.history.record import Record
from lmtrain.page.document import (
    NUM_COLOURS,
    WIDTH,
    Part,
    Picture,
    data_element,
    paragraph,
    rect,
    section,
    svg,
    table,
    text,
)
from lmtrain.runfolder.folder import Seen
from lmtrain.train.config import RunConfig
from lmtrain.train.layouts.layout_table import layout_words, merged, rank_rows
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


def memory_parts(seen: Seen, record: Record, whose: str) -> Iterator[Part]:
    layout, (step, peaks) = _layout(seen), newest_peaks(record)
    if layout is None or len(peaks) != layout.world_size:  # because: it was another one that wrote them
        return
    fullest, least = max(peaks), min(peaks)
    yield section(
        f"Memory of each rank{whose}",
        f"The most that each has held, as told by step {step:,}: the peak on the GPU, or what the process has resident "
        f"on a CPU. Rank {peaks.index(fullest)} holds most, {format_bytes(fullest)}; rank {peaks.index(least)} least, "
        f"{format_bytes(least)}.",
        f"memory{whose}",
    )
    yield Picture(f"memory{whose}", memory_picture(layout, peaks))
    yield data_element(json.dumps({"step": step, "peak_bytes": peaks}, separators=(",", ":")), f"memory-data{whose}")


def newest_peaks(record: Record) -> tuple[int, list[int]]:
    """The step of the row, and bytes by rank; none where there is no row that can be used."""
    rows, starts = record.rows.get("memory", []), record.rows.get("start", [])
    if not rows or (starts and rows[-1].get("attempt") != starts[-1].get("attempt")):
        return 0, []
    peaks = rows[-1].get("peak_bytes")
    if not isinstance(peaks, list) or not any(peaks):
        return 0, []
    are_sizes = all(type(peak) is int and 0 <= peak < 1 << 60 for peak in peaks)
    return (rows[-1]["step"], peaks) if are_sizes else (0, [])


def memory_picture(layout: Layout, peaks: Sequence[int]) -> str:
    """The darker, the fuller."""
    fullest = max(peaks)
    found = []
    for rank, peak in enumerate(peaks):
        at, share = layout.coordinate(rank), peak / fullest
        said = f"rank {rank}: {format_bytes(peak)}, {share:.1%} of the fullest"
        # because: ranks of a run differ by parts, not by orders
        found.append(Square(at, max(2 * share - 1, _LEAST), False, format_bytes(peak), said))
    return squares(found, "memory of each rank")


def _layout(seen: Seen) -> Layout | None:
    try:
        return build_settings(RunConfig, seen.settings).parallel.layout
    except _UNREADABLE:
        return None  # because: what is wrong with them is said where the layout is drawn


def layout_parts(seen: Seen, whose: str) -> Iterator[Part]:
    if not seen.settings:
        return
    try:
        config = build_settings(RunConfig, seen.settings)
        rows = rank_rows(config, config.model)
    except _UNREADABLE as error:
        yield section(f"Layout{whose}", name=f"layout{whose}")
        yield paragraph(f"It cannot be told from these settings: {brief(error)}")
        return
    yield section(f"Layout{whose}", layout_words(config.parallel), f"layout{whose}")
    if 1 < len(rows) <= _MOST_CELLS:
        yield Picture(f"layout{whose}", layout_picture(config, rows))
    elif len(rows) > 1:
        yield paragraph(f"Not drawn: {len(rows):,} ranks are more than the {_MOST_CELLS:,} that a page shows.")
    alike = merged(rows)
    if len(alike) > _MOST_ROWS:
        yield paragraph(f"Shown: the first {_MOST_ROWS} of {len(alike):,} rows.")
    yield table([_row(row) for row in alike[:_MOST_ROWS]])


def layout_picture(config: RunConfig, rows: Sequence[dict[str, Any]]) -> str:
    """A row for each rank of the pipeline, a column for each copy, shard and cut; the colour is the layers'."""
    layout = config.parallel.layout
    columns = layout.dp_replicate * layout.dp_shard * layout.tp
    left, top = 96.0, 44.0
    wide = min((WIDTH - left) / columns, 64.0)
    high = 26.0 if layout.pp <= 24 else 520 / layout.pp

    def parts() -> Iterator[str]:
        yield text(left, 14, _axes(layout), "soft small")
        for column in range(0, columns, layout.tp):
            copy, shard = divmod(column // layout.tp, layout.dp_shard)
            if layout.tp * wide >= 34:
                yield text(left + column * wide, top - 8, f"{copy}.{shard}", "soft small")
        for row in rows:
            column = (row["dp_replicate"] * layout.dp_shard + row["dp_shard"]) * layout.tp + row["tp"]
            x, y = left + column * wide, top + row["pp"] * high
            if column == 0:
                yield text(left - 8, y + high * 0.65, f"layers {row['layers'] or 'none'}", "soft small", "end")
            at = ", ".join(f"{axis} {row[axis]}" for axis in ("pp", "dp_replicate", "dp_shard", "tp"))
            said = f"rank {row['rank']} ({at}): layers {row['layers']}, {format_count(row['parameters'])} parameters"
            # because: cuts of one layer lie beside each other, and in two depths they are told apart
            shade = f"fill-opacity:{0.42 if (row['tp'] + row['dp_shard']) % 2 else 0.6}"
            yield rect(x, y, wide - 1, high - 1, f"r{row['pp'] % NUM_COLOURS} cell", said, shade)
            if wide >= 26 and high >= 18:
                yield text(x + wide / 2, y + high * 0.65, str(row["rank"]), "small quiet", "middle")

    return svg(top + layout.pp * high + 8, parts(), "which rank holds which layers")


def _axes(layout: Layout) -> str:
    across = [f"copy.shard ({layout.dp_replicate} x {layout.dp_shard})"] * (layout.dp > 1)
    across += [f"{layout.tp} cuts (tp) side by side"] * (layout.tp > 1)
    return f"down: ranks of the pipeline; across: {', '.join(across) or 'one rank each'}"


def _row(row: dict[str, Any]) -> dict[str, str]:
    places = ("pp", "dp_replicate", "dp_shard", "tp", "layers")
    names = dict(zip(("<rank", "pp", "replica", "shard", "tp", "layers"), ("rank", *places), strict=True))
    found = {name: str(row[key]) for name, key in names.items()} | {"parameters": format_count(row["parameters"])}
    return found | {name: format_bytes(row[key]) if row[key] else "-" for key, name in _HEADS.items()}


class Square(NamedTuple):
    at: Coordinate
    share: float  # how dark it is, from 0 to 1
    hot: bool
    shown: str  # in it, where there is room
    said: str


def squares(found: Sequence[Square], label: str) -> str:
    across = sorted({(one.at.dp_replicate, one.at.dp_shard, one.at.tp) for one in found})
    down = sorted({one.at.pp for one in found})
    left, top = 60.0, 24.0
    room = 7.0 * max(len(one.shown) for one in found) + 4
    wide = min((WIDTH - left) / len(across), max(room, 60.0))
    high = min(26.0, max(520 / len(down), 3.0))

    def parts() -> Iterator[str]:
        yield text(left, 14, "across: copy, shard, cut (dp_replicate, dp_shard, tp); down: pp", "soft small")
        for number, pp in enumerate(down):
            if number % math.ceil(14 / high) == 0:
                yield text(left - 8, top + number * high + high * 0.7, f"pp {pp}", "soft small", "end")
        for one in found:
            x = left + across.index((one.at.dp_replicate, one.at.dp_shard, one.at.tp)) * wide
            y = top + down.index(one.at.pp) * high
            kind = "heat hot" if one.hot else "heat"
            yield rect(x, y, wide - 1, high - 1, kind, one.said, f"fill-opacity:{_DARKEST * one.share:.2f}")
            if wide >= room and high >= 16:
                yield text(x + wide / 2, y + high * 0.68, one.shown, "small quiet", "middle")

    return svg(top + len(down) * high + 6, parts(), label)
