"""How much memory each rank of a run has held, as a picture in a report. Called by report_page.

The newest start's newest row of `memory`; where ranks sit, its settings say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from lmtrain.cli.report.ranks import Square, squares
from lmtrain.cli.runs.run_seen import Seen
from lmtrain.errors import LmtrainError
from lmtrain.layout import Layout
from lmtrain.observe.history.record import Record
from lmtrain.page.document import Part, Picture, data_element, section
from lmtrain.units import format_bytes

_LEAST = 0.06  # how dark the emptiest is


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
    if not isinstance(peaks, list) or not any(peaks) or not all(map(_is_size, peaks)):
        return 0, []
    return rows[-1]["step"], peaks


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


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
    from lmtrain.config.build import build_settings
    from lmtrain.train.config import RunConfig

    try:
        return build_settings(RunConfig, seen.settings).parallel.layout
    except (LmtrainError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # because: what is wrong with them is said where the layout is drawn
