"""A plan as one HTML file that needs no other: facts, tables and pictures, in light and in dark. Called by the verb."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from lmtrain.cli.plan import view
from lmtrain.cli.plan.planned_run import Found
from lmtrain.cli.plan.view import shown_ranks, timeline
from lmtrain.page.document import WIDTH, document, facts, legend, line, polyline, rect, section, svg, table, text
from lmtrain.plan.search.result import Answer, Point
from lmtrain.units import format_bytes, format_count

_KINDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "weights' gradients"}
_MOST_SPANS = 2500  # because: a page stays quick to open
_MOST_BARS = 5


def layouts_map(cells: dict[tuple[int, int], Answer | float], best: Answer | None, step: Callable[[float], str]) -> str:
    """A square for each pp and tp: the darker, the nearer to the best; empty where nothing fits."""
    stages, cuts = sorted({pp for pp, _ in cells}), sorted({tp for _, tp in cells})
    wide, high, left, top = min((WIDTH - 70) / len(stages), 120.0), 42.0, 60.0, 30.0

    def parts() -> Iterator[str]:
        for column, pp in enumerate(stages):
            yield text(left + (column + 0.5) * wide, top - 8, f"pp {pp}", "soft", "middle")
        for row, tp in enumerate(cuts):
            yield text(left - 8, top + (row + 0.6) * high, f"tp {tp}", "soft", "end")
            for column, pp in enumerate(stages):
                x, y = left + column * wide, top + row * high
                match cells.get((pp, tp)):
                    case Answer() as one:
                        share = best.seconds / one.seconds if best else 1.0
                        said = f"pp {pp}, tp {tp}: {step(one.seconds)}, {format_bytes(one.held)}"
                        style = f"fill-opacity:{0.7 * max(share, 0.06) ** 2:.3f}"
                        kind = "best" if one.seconds == (best and best.seconds) else "fits"
                        yield rect(x + 1, y + 1, wide - 2, high - 2, kind, said, style)
                        yield text(x + wide / 2, y + 18, step(one.seconds), anchor="middle")
                        yield text(x + wide / 2, y + 33, f"{one.mfu:.0%}", "small", "middle")
                    case float() as needed:
                        yield rect(x + 1, y + 1, wide - 2, high - 2, "unfit", f"pp {pp}, tp {tp}: does not fit")
                        yield text(x + wide / 2, y + 25, f"{needed / 2**30:,.0f} GiB", "soft small", "middle")

    return svg(top + len(cuts) * high + 6, parts(), "the fastest layout for each number of stages and of cuts")


def memory_bars(fitting: Sequence[Answer], too_large: Sequence[Answer], words: Callable[[Answer], str]) -> str:
    every = [*fitting, *too_large]
    most = max(max(one.held for one in every), every[0].room) * 1.02
    high, left, top = 34.0, 10.0, 46.0
    names = [name for name in every[0].memory if any(one.memory[name] > 0 for one in every)]

    def at(value: float) -> float:
        return left + value / most * (WIDTH - 2 * left)

    def parts() -> Iterator[str]:
        yield from legend([(f"m-{name}", name) for name in names], left)
        for row, one in enumerate(every):
            y, done = top + row * (high + 14), 0.0
            yield text(left, y - 3, f"{words(one)}: {format_bytes(one.held)}", "small")
            for name in names:
                value = one.memory[name]
                wide = at(done + value) - at(done)
                yield rect(at(done), y, wide, high - 14, f"m-{name}", f"{name}: {format_bytes(value)}")
                done += value
        x = at(every[0].room)
        yield line(x, top - 14, x, top + len(every) * (high + 14), "limit")
        yield text(x - 4, top - 18, f"the GPU has {format_bytes(every[0].room)}", "small", "end")

    return svg(top + len(every) * (high + 14) + 4, parts(), "bytes of the fullest rank by name")


def pipeline(one: Answer) -> str:
    found, _ = timeline(one)
    ranks = shown_ranks(one.run.parallel.pp, max(_MOST_SPANS * one.run.parallel.pp // max(len(found.spans), 1), 4))
    high, left, top, total = min(26.0, 420 / len(ranks)), 60.0, 26.0, found.makespan
    scale = (WIDTH - left - 6) / total

    def parts() -> Iterator[str]:
        used = {span.action.kind for span in found.spans}
        yield from legend([(f"p-{kind}", name) for kind, name in _KINDS.items() if kind in used], left)
        for row, rank in enumerate(ranks):
            y = top + row * high
            yield text(left - 8, y + high * 0.7, f"rank {rank}", "soft small", "end")
            yield rect(left, y, total * scale, high - 2, "idle")
            for span in found.spans:
                if span.rank == rank:
                    said = f"{_KINDS[span.action.kind]}, stage {span.action.stage}, microbatch {span.action.microbatch}"
                    wide = (span.end - span.start) * scale - 0.4
                    yield rect(left + span.start * scale, y, wide, high - 2, f"p-{span.action.kind}", said)

    return svg(top + len(ranks) * high + 4, parts(), "what each rank of the pipeline does when")


def scaling(points: Sequence[Point]) -> str:
    """Tokens a second and GPU over the number of GPUs, with the interval; full sharding beside it."""
    shown = [(point, point.best) for point in points if point.best is not None]
    left, right, top, bottom = 70.0, 150.0, 16.0, 250.0
    high = 1.08 * max(best.tokens / best.between[0] / best.gpus for _, best in shown)
    first, last = shown[0][0].gpus, shown[-1][0].gpus

    def x(gpus: int) -> float:
        return left + math.log2(gpus / first) / (math.log2(last / first) or 1.0) * (WIDTH - left - right)

    def y(value: float) -> float:
        return bottom - value / high * (bottom - top)

    def parts() -> Iterator[str]:
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            yield line(left, y(share * high), WIDTH - right, y(share * high), "grid")
            yield text(left - 6, y(share * high) + 4, format_count(share * high), "soft small", "end")
        fast, slow = (
            [f"{x(best.gpus):.1f},{y(best.tokens / best.between[end] / best.gpus):.1f}" for _, best in shown]
            for end in (0, 1)
        )
        yield f'<polygon points="{" ".join([*fast, *reversed(slow)])}" class="band"/>'
        curve = [(x(best.gpus), y(best.tokens_per_s / best.gpus)) for _, best in shown]
        yield from _line(curve, "curve", "best layout")
        plain = [(x(p.gpus), y(p.plain.tokens_per_s / p.gpus)) for p, _ in shown if p.plain]
        yield from _line(plain, "curve plain", "all sharded (ZeRO 3)") if plain else ()
        for _, best in shown:
            parallel = best.run.parallel
            yield text(x(best.gpus), bottom + 18, f"{best.gpus:,}", "small", "middle")
            yield text(x(best.gpus), bottom + 34, f"pp {parallel.pp}, tp {parallel.tp}", "soft small", "middle")

    return svg(bottom + 44, parts(), "tokens a second and GPU over the number of GPUs")


def _line(points: Sequence[tuple[float, float]], kind: str, name: str) -> Iterator[str]:
    yield polyline(points, kind)
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{kind}"/>' for x, y in points)
    yield text(points[-1][0] + 8, points[-1][1] + 4, name, "small")


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
    yield layouts_map(found.cells, first, view.step_time)
    yield section(
        "Memory of the fullest rank", "The best layouts, and below them what would be faster or misses by least."
    )
    yield memory_bars(found.best[:_MOST_BARS], found.too_large, view.layout_of)
    if first is not None and first.run.parallel.pp > 1:
        parallel, count = first.run.parallel, timeline(first)[1]
        every = first.run.num_microbatches
        few = f", shown with {count} of {every} microbatches" * (count < every)
        yield section("Pipeline", f"{parallel.schedule}, {parallel.pp} ranks with {parallel.vp} stages each{few}.")
        yield pipeline(first)
    if sum(point.best is not None for point in found.points) > 1:
        yield section("More GPUs", "Tokens a second and GPU. The band holds four runs of five.")
        yield scaling(found.points)
        yield table([view.row_of(point, found.by) for point in found.points])
        yield from (f"<p>{escape(line)}.</p>" for line in view.takeovers(found.points, found.by))
    yield '<p class="soft">Predicted by lmtrain plan. Joules are unverified, and of GPUs alone.</p>'
