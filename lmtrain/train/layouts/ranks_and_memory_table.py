"""The table of ranks and the memory each holds, shown at start and by --dry-run. Torch-free.

Called by set-up and the command line. Sizes are placement's closed forms over the model's own list of weights.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any

from lmtrain.layout import Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.attention_activation_bytes import FP32_BYTES
from lmtrain.placement.layers_and_shards_of_ranks import Placement, shard_rows, stages_of_rank
from lmtrain.placement.weight_and_activation_bytes import count_elements, placements_of_stages, rank_bytes
from lmtrain.runfolder.run_facts import parameters_text
from lmtrain.train.run_config import RunConfig
from lmtrain.units import format_bytes, format_count

Row = dict[str, Any]

SINGLE_ROWS = 16  # above this number, rows that differ only in their rank are merged
_IDENTITY_KEYS = ("rank", "host", "pp", "dp_replicate", "dp_shard", "tp")
_HEADINGS = {
    "rank": "rank", "host": "host", "pp": "pp", "dp_replicate": "rep", "dp_shard": "shard", "tp": "tp",
    "layers": "layers", "parameters": "params", "weights_bytes": "weights", "masters_bytes": "masters",
    "gradients_bytes": "grads", "optimizer_bytes": "optim",
}  # fmt: skip
_LEFT_ALIGNED = ("rank", "host")
_HOST_WIDTH = 12  # because: with all other columns at their widest, a row still fits in 80 characters


def rank_rows(config: RunConfig, model: ModelSettings, hosts: Sequence[str] = ()) -> list[Row]:
    """Return a table row per rank, in rank order, as key -> value: rank, host, coordinates (pp, tp and so on), layers,
    number of parameters, and bytes of weights, gradients and optimizer state. `hosts` has each rank's host name; empty
    if unknown.
    """
    layout = config.parallel.layout
    sizes = [_sizes_by_shard(config, model, pp) for pp in range(layout.pp)]
    hosts = hosts or ([socket.gethostname()] if layout.world_size == 1 else ["-"] * layout.world_size)
    coordinates = [layout.coordinate(rank) for rank in range(len(hosts))]
    return [
        {"rank": rank, "host": host} | vars(coordinate) | sizes[coordinate.pp][coordinate.dp_shard]
        for rank, (host, coordinate) in enumerate(zip(hosts, coordinates, strict=True))
    ]


def _sizes_by_shard(config: RunConfig, model: ModelSettings, pp: int) -> list[Row]:
    """Return, for each dp_shard index in order, what a rank with it holds in the pipeline rank `pp`: layers as text,
    number of parameters, and bytes of weights, gradients and optimizer state. Equal shards are computed once.
    """
    layout, stages = config.parallel.layout, stages_of_rank(model, config.parallel, pp)
    heights = sorted({place.part_shape[0] for place in placements_of_stages(model, stages, layout, 0)})
    rows = [tuple(len(shard_rows(h, layout.dp_shard, shard)) for h in heights) for shard in range(layout.dp_shard)]
    layers = ",".join(range_text([*stage.layers]) for stage in stages if stage.layers)
    sizes = {
        rows[shard]: {"layers": layers}
        | _rank_sizes(config, layout, placements_of_stages(model, stages, layout, shard))
        for shard in map(rows.index, set(rows))
    }
    return [sizes[key] for key in rows]


def _rank_sizes(config: RunConfig, layout: Layout, places: Sequence[Placement]) -> Row:
    """Return the number of parameters, and the bytes of weights, gradients and optimizer state, that a rank holds.
    `places` has a Placement for each parameter of its stages, which says which part of it is on the rank. An average of
    the weights counts as optimizer state.
    """
    work_bytes = FP32_BYTES if config.precision.kind == "fp32" else FP32_BYTES // 2
    numbers = count_elements(places, layout, config.optim.num_slots)
    sizes = rank_bytes(
        numbers, layout, zero=config.parallel.zero, work_bytes=work_bytes, keeps_average=config.checkpoint.ema.is_on
    )
    # because: unsharded fp32 weights serve as both weights and masters
    is_unsharded = layout.dp == 1 and sizes.work == 0
    return {
        "parameters": numbers.parts,
        "weights_bytes": sizes.masters if is_unsharded else sizes.work,
        "masters_bytes": 0 if is_unsharded else sizes.masters,
        "gradients_bytes": sizes.gradients,
        "optimizer_bytes": sizes.optimizer + sizes.average,
    }


def merge_rows(rows: Sequence[Row]) -> list[Row]:
    """Merge table rows with equal layers, parameters and bytes into one row each, whose rank and coordinates are texts
    such as "0-3" and whose host is a name or "N hosts". `rows` are in the order of the ranks.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        sizes = tuple(value for key, value in row.items() if key not in _IDENTITY_KEYS)
        groups.setdefault(sizes, []).append(row)
    return [group[0] | {key: _merged_text(key, {row[key] for row in group}) for key in _IDENTITY_KEYS}
            for group in groups.values()]  # fmt: skip


def _merged_text(key: str, values: set[Any]) -> str:
    """Return one text for the `values` that merged rows have in the column `key`: a host or "N hosts" for "host", else
    the `range_text` of ranks or coordinates.
    """
    if key != "host":
        return range_text(sorted(values))
    return str(min(values)) if len(values) == 1 else f"{len(values)} hosts"


def range_text(numbers: Sequence[int]) -> str:
    """Return sorted whole numbers as text: [4] -> "4", [0, 1, 2] -> "0-2", and with gaps [0, 1, 5] -> "0..".

    With gaps, the coordinates show which ranks are meant.
    """
    first, last, count = numbers[0], numbers[-1], len(numbers)
    if count == 1:
        return str(first)
    return f"{first}-{last}" if last - first + 1 == count else f"{first}.."


def layout_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table of ranks, at most 80 columns wide. A column of hosts, coordinates or bytes is left
    out if it is empty or 0 in every row.
    """
    empty_values = {
        key: (0, "0", "-") if key in _IDENTITY_KEYS[1:] or key.endswith("_bytes") else () for key in _HEADINGS
    }
    headings = {key: head for key, head in _HEADINGS.items() if any(row[key] not in empty_values[key] for row in rows)}
    table = [list(headings.values()), *([_cell_text(key, row[key]) for key in headings] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        yield " ".join(
            cell.ljust(width) if key in _LEFT_ALIGNED else cell.rjust(width)
            for key, cell, width in zip(headings, cells, widths, strict=True)
        ).rstrip()


def padding_lines(parameters: int, padded: int) -> Iterator[str]:
    """Yield a line to put below the table of ranks if its numbers of parameters count padding, which the number of the
    model's `parameters` does not; `padded` is that with padding.
    """
    if padded != parameters:
        yield f"params counts padding of the vocabulary; in all {parameters_text(parameters, padded)}"


def _cell_text(key: str, value: Any) -> str:
    """Format a cell of the table; `key` is the column's key in a row, such as "weights_bytes"."""
    if key.endswith("_bytes"):
        return short_bytes(value) if value else "-"
    if key == "parameters":
        return format_count(value)
    return str(value)[:_HOST_WIDTH] if key == "host" else str(value)


def short_bytes(value: int) -> str:
    """Return bytes with three significant digits and no space: 341_522_022 -> "326MiB"."""
    number, unit = format_bytes(value).split()
    return f"{float(number):.3g}{unit}" if float(number) < 1000 else f"{float(number):.0f}{unit}"
