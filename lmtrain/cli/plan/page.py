"""A plan as one HTML file that needs no other: facts, tables and pictures, in light and in dark. Called by the verb."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from lmtrain.cli.plan import drawings as draw
from lmtrain.cli.plan import view
from lmtrain.cli.plan.pipeline_picture import timeline
from lmtrain.cli.plan.planned_run import Found
from lmtrain.page.document import document, facts, section, table

_MOST_BARS = 5


def page(found: Found) -> str:
    return document(view.title(found), _parts(found))


def _parts(found: Found) -> Iterator[str]:
    first = found.first
    yield f"<h1>{escape(view.title(found))}</h1>"
    yield facts(view.facts(found))
    if first is not None:
        yield section("The best")
        yield facts(view.of_best(found, first))
        yield section(
            "Layouts, fastest first" if found.by == "time" else "Layouts, least energy first",
            "80%: four runs of five take so long. Bare: time in which ranks only communicate."
        )
        yield table([view.row(found, at, one, True) for at, one in enumerate(found.best, 1)])
        for at, one in enumerate(found.best[1:3], 2):
            yield f"<p>{escape(view.lost(found, at, one))}.</p>"
    yield section(
        "Map",
        "The fastest step for each number of stages (pp) and cuts (tp), and its MFU; four runs of five are within "
        f"{found.ranked.prices.interval:.0%} of it. Grey: what the smallest needs.",
    )
    yield draw.layouts_map(found.cells, first, view.step_time)
    yield section(
        "Memory of the fullest rank", "The best layouts, and below them what would be faster or misses by least."
    )
    yield draw.memory_bars(found.best[:_MOST_BARS], found.too_large, view.layout_of)
    if first is not None and first.run.parallel.pp > 1:
        parallel, count = first.run.parallel, timeline(first)[1]
        few = f", shown with {count} of {first.run.num_microbatches} microbatches" * (
            count < first.run.num_microbatches
        )
        yield section("Pipeline", f"{parallel.schedule}, {parallel.pp} ranks with {parallel.vp} stages each{few}.")
        yield draw.pipeline(first)
    if sum(point.best is not None for point in found.points) > 1:
        yield section("More GPUs", "Tokens a second and GPU. The band holds four runs of five.")
        yield draw.scaling(found.points)
        yield table([view.row_of(point, found.by) for point in found.points])
        yield from (f"<p>{escape(line)}.</p>" for line in view.takeovers(found.points, found.by))
    yield '<p class="soft">Predicted by lmtrain plan. Joules are unverified, and of GPUs alone.</p>'
