"""A square for each rank of a run, by its place in the layout: down the pipeline, across copies, shards and cuts.

Called by what a report shows of every rank: its own work, its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmtrain.layout import Coordinate
from lmtrain.page.drawing import WIDTH, rect, svg, text

_DARKEST = 0.6  # because: the number in it must be readable, in light and in dark


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
