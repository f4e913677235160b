"""Who holds what: a report's picture of the ranks of a run, and the bytes of each kind that they hold.

Called by report_page. What the settings say, not what was measured; a run of one process needs no picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmtrain.cli.runs.run_seen import Seen
from lmtrain.errors import LmtrainError, brief
from lmtrain.page.document import NUM_COLOURS, Part, Picture, paragraph, section, table
from lmtrain.page.drawing import WIDTH, rect, svg, text
from lmtrain.units import format_bytes, format_count

if TYPE_CHECKING:
    from lmtrain.train.config import RunConfig

_MOST_CELLS = 4096
_MOST_ROWS = 64
_HEADS = {
    "weights_bytes": "weights", "masters_bytes": "masters", "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
}  # fmt: skip


def layout_parts(seen: Seen, whose: str) -> Iterator[Part]:
    from lmtrain.config.build import build_settings
    from lmtrain.train.config import RunConfig
    from lmtrain.train.layouts.layout_table import layout_words, merged, rank_rows

    if not seen.settings:
        return
    try:
        config = build_settings(RunConfig, seen.settings)
        rows = rank_rows(config, config.model)
    except (LmtrainError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
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
            yield rect(x, y, wide - 1, high - 1, f"r{row['pp'] % NUM_COLOURS} cell", said, _shade(row, layout))
            if wide >= 26 and high >= 18:
                yield text(x + wide / 2, y + high * 0.65, str(row["rank"]), "small quiet", "middle")

    return svg(top + layout.pp * high + 8, parts(), "which rank holds which layers")


def _axes(layout: Any) -> str:
    across = [f"copy.shard ({layout.dp_replicate} x {layout.dp_shard})" if layout.dp > 1 else ""]
    across += [f"{layout.tp} cuts (tp) side by side" if layout.tp > 1 else ""]
    said = ", ".join(filter(None, across)) or "one rank each"
    return f"down: ranks of the pipeline; across: {said}"


def _shade(row: dict[str, Any], layout: Any) -> str:
    """Cuts of one layer lie beside each other in two depths, so that they are told apart."""
    return f"fill-opacity:{0.42 if (row['tp'] + row['dp_shard']) % 2 else 0.6}"


def _row(row: dict[str, Any]) -> dict[str, str]:
    names = {
        "<rank": "rank",
        "pp": "pp",
        "replica": "dp_replicate",
        "shard": "dp_shard",
        "tp": "tp",
        "layers": "layers",
    }
    found = {name: str(row[key]) for name, key in names.items()} | {"parameters": format_count(row["parameters"])}
    return found | {name: format_bytes(row[key]) if row[key] else "-" for key, name in _HEADS.items()}
