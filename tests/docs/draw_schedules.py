"""Draws docs/explanation/pipelines.svg from the schedules' own tables, as the simulator replays them.

    python -m tests.docs.draw_schedules

tests/docs/test_drawings.py keeps it current. Colours read well on a light page and on a dark one.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.schedule_simulator import Costs, Timeline, simulate
from lmtrain.schedules.table import Action, Kind
from tests.docs.pages import ROOT

DRAWING = ROOT / "docs/explanation/pipelines.svg"
RANKS, MICROBATCHES = 4, 8
PANELS = (("1f1b", 1), ("interleaved", 2))
LEFT, UNIT = 56, 20  # pixels for the names of ranks, and for a forward of all layers of a rank
ROW, PANEL = 24, 152  # pixels from rank to rank, and from schedule to schedule
# fill and text: of a rank's first stage, of its second
COLOURS = {
    Kind.FORWARD: (("#0f766e", "#ffffff"), ("#5eead4", "#134e4a")),
    Kind.BACKWARD: (("#b45309", "#ffffff"), ("#fcd34d", "#78350f")),
}
NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}


def drawing() -> str:
    width = LEFT + round(_timeline(*PANELS[0]).makespan * UNIT) + 4
    height = len(PANELS) * PANEL + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" fill="#808080">',
        *(line for number, panel in enumerate(PANELS) for line in _panel(number * PANEL, width, *panel)),
        *_legend(height - 16),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _timeline(schedule: str, chunks: int) -> Timeline:
    each = 1 / chunks  # because: where a rank has more stages, these have fewer layers
    costs = Costs(forward=each, input=each, weight=each)
    return simulate(schedule_named(schedule).table(RANKS, chunks, MICROBATCHES), costs)


def _panel(top: int, width: int, schedule: str, chunks: int) -> Iterator[str]:
    timeline = _timeline(schedule, chunks)
    idle = Fraction(timeline.bubble).limit_denominator(100)
    yield (
        f'<text x="{LEFT}" y="{top + 16}"><tspan font-weight="bold">{schedule}</tspan>, {chunks} '
        f"stage{'s' * (chunks > 1)} a rank: idle for {idle} of its work</text>"
    )
    top += 26
    for rank in range(RANKS):
        y = top + rank * ROW
        yield f'<text x="0" y="{y + 15}">rank {rank}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{width - LEFT - 4}" height="{ROW - 3}" fill="#8881"/>'
        for kind, shades in COLOURS.items():
            for chunk, colours in enumerate(shades[:chunks]):
                yield from _boxes(timeline, Action(kind, chunk * RANKS + rank, 0), y, *colours)


def _boxes(timeline: Timeline, like: Action, y: int, fill: str, ink: str) -> Iterator[str]:
    """One path for all microbatches of a stage, and one text: each of its digits has a place of its own."""
    spans = [span for span in timeline.spans if (span.action.kind, span.action.stage) == (like.kind, like.stage)]
    starts = [LEFT + span.start * UNIT for span in spans]
    wide = (spans[0].end - spans[0].start) * UNIT
    boxes = "".join(f"M{x + 0.5:g} {y}h{wide - 1:g}v{ROW - 3}h{1 - wide:g}z" for x in starts)
    middles = " ".join(f"{x + wide / 2:g}" for x in starts)
    digits = "".join(str(span.action.microbatch + 1) for span in spans)
    yield f'<path d="{boxes}" fill="{fill}"/>'
    yield f'<text x="{middles}" y="{y + 14}" text-anchor="middle" font-size="10" fill="{ink}">{digits}</text>'


def _legend(y: int) -> Iterator[str]:
    x = LEFT
    for kind, shades in COLOURS.items():
        for (fill, _), which in zip(shades, ("", " of the second stage"), strict=True):
            text = NAMES[kind] + which
            yield f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{fill}"/>'
            yield f'<text x="{x + 18}" y="{y + 10}">{text}</text>'
            x += 40 + 6 * len(text)


if __name__ == "__main__":
    DRAWING.write_text(drawing(), encoding="utf-8")
    print(f"wrote {DRAWING}")
