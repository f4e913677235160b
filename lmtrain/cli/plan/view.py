"""What `lmtrain plan` shows: the facts, the table of layouts, why others lost, the curve, and a pipeline.

On a screen, good at 80 columns, with more to say at 120; and as one HTML file that needs no other, with pictures, in
light and in dark. Called by the verb with what was found; it works nothing out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from lmtrain.cli.plan.planning import Found
from lmtrain.cli.screen.console import PlainConsole, print_facts, print_table
from lmtrain.cli.screen.terminal import echo, print_message
from lmtrain.observe.screen.row_text import percent
from lmtrain.page.document import (
    WIDTH,
    Cells,
    build_page,
    fact_list,
    html_table,
    section_heading,
    svg_element,
    svg_legend,
    svg_line,
    svg_polyline,
    svg_rect,
    svg_text,
)
from lmtrain.plan.run_model.replay import replay_step
from lmtrain.plan.search.layout_result import STEP_PARTS, CurvePoint, LayoutResult, excess_share, why_slower
from lmtrain.schedules.simulate import Timeline
from lmtrain.schedules.table import Kind
from lmtrain.units import format_bytes, format_count, format_seconds

_MOST_RANKS = 8
_WIDE = 110  # columns in which more is said
_WHERE_WIDE = ("80%", "bubble", "bare", "tok/s/GPU", "J/token")  # columns
_BEHIND = {"time": "is {:.1%} slower", "joules": "takes {:.1%} more energy"}
_SIGNS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "B", Kind.WEIGHT: "W"}
_KINDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "weights' gradients"}
_MOST_SPANS = 2500  # because: a page stays quick to open
_MOST_BARS = 5
_NAME_HEIGHT = 14.0  # of a line's name in a picture


def print_found(found: Found) -> None:
    console = PlainConsole()
    print_facts(title(found), facts_of(found))
    if found.first is None:
        _print_too_large(console, found)
        return
    echo()
    wide = console.width >= _WIDE
    rows = [row(found, at, one, wide) for at, one in enumerate(found.best, 1)]
    print_table(rows, gap=1, optional_columns=("slower",))
    echo()
    print_facts("the best", of_best(found, found.first))
    for at, one in enumerate(found.best[1:3], 2):
        print_message(console, lost(found, at, one))
    if found.too_large:
        echo()
        _print_too_large(console, found)
    if len(found.points) > 1:
        echo("\nwith more GPUs", bold=True)
        print_table([row_of(point, found.by) for point in found.points], gap=1, optional_columns=("tok/s",))
        for line in takeovers(found.points, found.by):
            print_message(console, line)
    if found.first.run.parallel.pp > 1:
        echo()
        for line in picture(found.first, console.width, plain=not console.encoding.startswith("utf")):
            echo(line)


def title(found: Found) -> str:
    run, question = found.question.run, found.question
    size = format_count(run.model.num_parameters)
    return f"{run.model.kind}, {size} parameters, on {question.gpus:,} x {question.hardware.name}"


def facts_of(found: Found) -> Iterator[tuple[str, str]]:
    question, ranked = found.question, found.ranked
    run, hardware = question.run, question.hardware
    batch = run.global_batch * run.shape.seq_len
    yield "batch", f"{run.global_batch:,} samples of {run.shape.seq_len:,}: {format_count(batch)} tokens a step"
    nodes = -(-question.gpus // hardware.gpus_per_node)
    said = f"{nodes:,} node{'s' * (nodes > 1)} of {hardware.gpus_per_node}, {hardware.nic_GBps:g} GB/s of network each"
    yield "machine", said + ("; not checked against measured runs" if hardware.unchecked else "")
    yield "layouts", (
        f"{len(ranked.space):,} are legal, {len(ranked.rows):,} of them differ in price, {ranked.num_fitting:,} fit in "
        f"{format_bytes(ranked.usable_bytes)} ({ranked.limits.margin:.0%} of the memory stays free)"
    )
    for said, span in found.ranges:
        yield "assumed", said + (f"; {format_count(span[0])} to {format_count(span[1])} tokens/s else" if span else "")


def row(found: Found, at: int, one: LayoutResult, wide: bool) -> Cells:
    first, parallel, run = found.best[0], one.run.parallel, one.run
    cells = {
        "#": str(at), "pp": str(parallel.pp), "vp": str(parallel.vp), "tp": str(parallel.tp),
        "dp": f"{parallel.dp_replicate}x{parallel.dp_shard}", "zero": str(parallel.zero),
        "<schedule": parallel.schedule if parallel.pp > 1 else "-", "micro": str(run.micro_batch),
        "<recompute": run.recompute.words, "step": step_time(one.seconds) if wide else likely(one),
        "80%": "-".join(map(step_time, one.interval_s)), "GiB": f"{one.total_bytes / 2**30:.1f}",
        "MFU": percent(one.mfu),
        "bubble": percent(one.bubble_share), "bare": percent(one.exposed_share),
        "tok/s/GPU": format_count(one.tokens_per_s / one.gpus), "J/token": f"{one.joules_per_token:.3g}",
        "slower": "" if one is first else f"{one.seconds / first.seconds - 1:+.1%}",
    }  # fmt: skip
    return {title: cell for title, cell in cells.items() if wide or title not in _WHERE_WIDE}


def lost(found: Found, at: int, one: LayoutResult) -> str:
    """Return why a layout is not the best, in words."""
    first = found.best[0]
    said = f"{at} {_BEHIND[found.by].format(excess_share(one, first, found.by))}"
    return f"{said}: {why_slower(one, first)}" if one.seconds > first.seconds else said


def step_time(seconds: float) -> str:
    if seconds >= 1000:
        return format_seconds(seconds)
    return f"{seconds:.3g}s" if seconds >= 1 else f"{1000 * seconds:.3g}ms"


def likely(one: LayoutResult) -> str:
    """Return a step's time with the interval that holds four runs of five."""
    return f"{step_time(one.seconds)}±{one.interval:.0%}"


def of_best(found: Found, best: LayoutResult) -> Iterator[tuple[str, str]]:
    low, high = best.interval_s
    yield "step", (
        f"{step_time(best.seconds)} ({step_time(low)} to {step_time(high)} in four runs of five), "
        f"{format_count(best.tokens_per_s)} tokens/s, MFU {percent(best.mfu)}"
    )
    yield "of which", shares({STEP_PARTS[name]: value for name, value in best.parts.items()}, best.seconds)
    yield "memory", f"{format_bytes(best.total_bytes)} of {format_bytes(best.device_bytes)} on the fullest rank"
    yield "of which", shares(best.memory, best.total_bytes)
    tokens, hours = found.question.tokens or 0, ""
    if duration := found.duration(best):
        likely_s, low_s, high_s = map(days, duration)
        yield "all tokens", f"{format_count(tokens)} in {likely_s} ({low_s} to {high_s}), without saves"
        hours = f", {tokens * best.joules_per_token / 3.6e9:.3g} MWh"
    yield "energy", f"{best.joules_per_token:.3g} J/token{hours}; unverified, GPUs alone"
    if cost := found.dollars(best):
        yield "cost", f"${cost[0]:,.0f} (${cost[1]:,.0f} to ${cost[2]:,.0f})"
    if every := found.save_every:
        yield "save every", f"{format_seconds(every[0])} to {format_seconds(every[1])}, by Young and Daly"
    yield "settings", " ".join(settings(best, is_whole=found.question.has_layout))


def settings(one: LayoutResult, *, is_whole: bool) -> Iterator[str]:
    """Words for `lmtrain pretrain`: what differs from the usual; all, where a config has a layout of its own."""
    usual, parallel = type(one.run.parallel)(), one.run.parallel
    for name in ("pp", "vp", "dp_replicate", "dp_shard", "tp", "zero", "sequence_parallel", "schedule", "balance"):
        value = getattr(parallel, name)
        if is_whole or value != getattr(usual, name):
            yield f"parallel.{name}={str(value).lower()}"
    yield f"train.micro_batch={one.run.micro_batch}"
    yield f"train.global_batch={one.run.global_batch}"
    yield from one.run.recompute.settings
    if is_whole and getattr(one.run.recompute, "blocks", 0) is None:
        yield "recompute.blocks=null"
    yield f"precision={one.run.precision.kind}"


def shares(parts: Mapping[str, float], whole: float) -> str:
    ordered = sorted(parts.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {value / whole:.0%}" for name, value in ordered if value >= 0.005 * whole)


def days(seconds: float) -> str:
    return f"{seconds / 86400:.3g} days" if seconds >= 86400 else format_seconds(seconds)


def _print_too_large(console: Any, found: Found) -> None:
    print_message(console, "faster, and too large:" if found.first else "nothing fits. What misses by least:")
    for one in found.too_large:
        print_message(console, f"  {layout_of(one)}: {likely(one)}, {format_bytes(found.over(one))} too much")


def layout_of(one: LayoutResult) -> str:
    parallel = one.run.parallel
    sizes = [f"{axis}={getattr(parallel, axis)}" for axis in ("pp", "tp", "dp_replicate", "dp_shard", "zero")]
    stages = f"{parallel.schedule} vp={parallel.vp}, " if parallel.pp > 1 else ""
    return f"{' '.join(sizes)}, {stages}microbatch {one.run.micro_batch}, recompute {one.run.recompute.words}"


def row_of(point: CurvePoint, by: str) -> Cells:
    best, plain = point.best, point.zero3_only
    if best is None:
        return {"GPUs": f"{point.gpus:,}", "<best layout": "nothing fits"}
    parallel = best.run.parallel
    words = f"pp {parallel.pp} tp {parallel.tp} dp {parallel.dp_replicate}x{parallel.dp_shard} zero {parallel.zero}"
    return {
        "GPUs": f"{point.gpus:,}", "<best layout": words, "step": likely(best),
        "tok/s": format_count(best.tokens_per_s),
        "tok/s/GPU": format_count(best.tokens_per_s / best.gpus), "W/GPU": f"{best.watts:.0f}",
        "gain": "" if point.gain is None else f"x{point.gain:.2f}",
        "sharded": "-" if plain is None else f"{excess_share(plain, best, by):+.1%}",
    }  # fmt: skip


def takeovers(points: Sequence[CurvePoint], by: str) -> Iterator[str]:
    """Yield a line for each number of GPUs at which another layout is best than at half as many."""
    for before, point in pairwise(points):
        if point.best is None or before.best is None:
            continue
        old, new = before.best.run.parallel, point.best.run.parallel
        if (old.pp, old.tp) == (new.pp, new.tp):
            continue
        kept = point.same_cut and f"; as before it {_BEHIND[by].format(excess_share(point.same_cut, point.best, by))}"
        yield (
            f"between {before.gpus:,} and {point.gpus:,}: pp {new.pp} and tp {new.tp} take over from pp {old.pp} and "
            f"tp {old.tp}{kept or ', which does not fit'}"
        )


def timeline(one: LayoutResult) -> tuple[Timeline, str]:
    """Simulate a step of a few micro-batches; return its timeline, and how few they are in words."""
    every = one.run.num_microbatches
    count = min(every, 2 * one.run.parallel.pp)
    return replay_step(one.run, one.microbatch, count), f", shown with {count} of {every} microbatches" * (
        count < every
    )


def shown_ranks(num_ranks: int, most: int = _MOST_RANKS) -> list[int]:
    """Return all ranks, or `most` of them spread evenly, the first and the last among them."""
    most = min(num_ranks, most)
    return [round(at * (num_ranks - 1) / max(most - 1, 1)) for at in range(most)]


def picture(one: LayoutResult, width: int, *, plain: bool) -> Iterator[str]:
    found, few = timeline(one)
    total, parallel = found.makespan, one.run.parallel
    yield f"pipeline: {parallel.schedule}, {parallel.pp} ranks x {parallel.vp}{few}"
    gap, columns = "." if plain else "·", min(width, 120) - 6
    for rank in shown_ranks(parallel.pp):
        cells = [gap] * columns
        for span in found.spans:
            if span.rank == rank:
                first, last = int(span.start / total * columns), int(span.end / total * columns)
                for at in range(first, max(min(last, columns), first + 1)):
                    cells[min(at, columns - 1)] = _SIGNS[span.action.kind]
        yield f"{rank:>4}  {''.join(cells)}".rstrip()
    yield f"      F forward, B backward, W weights' gradients, {gap} waits"


def layouts_map(
    cells: dict[tuple[int, int], LayoutResult | float], best: LayoutResult | None, step: Callable[[float], str]
) -> str:
    """Draw a square for each pp and tp: the darker, the nearer to the best; empty if nothing fits."""
    stages, cuts = sorted({pp for pp, _ in cells}), sorted({tp for _, tp in cells})
    wide, high, left, top = min((WIDTH - 70) / len(stages), 120.0), 42.0, 60.0, 30.0

    def parts() -> Iterator[str]:
        for column, pp in enumerate(stages):
            yield svg_text(left + (column + 0.5) * wide, top - 8, f"pp {pp}", "soft", "middle")
        for row, tp in enumerate(cuts):
            yield svg_text(left - 8, top + (row + 0.6) * high, f"tp {tp}", "soft", "end")
            for column, pp in enumerate(stages):
                x, y = left + column * wide, top + row * high
                match cells.get((pp, tp)):
                    case LayoutResult() as one:
                        said = f"pp {pp}, tp {tp}: {step(one.seconds)}, {format_bytes(one.total_bytes)}"
                        share = best.seconds / one.seconds if best else 1.0
                        style = f"fill-opacity:{0.7 * max(share, 0.06) ** 2:.3f}"
                        kind = "best" if one.seconds == (best and best.seconds) else "fits"
                        yield svg_rect(x + 1, y + 1, wide - 2, high - 2, kind, said, style)
                        yield svg_text(x + wide / 2, y + 18, step(one.seconds), anchor="middle")
                        yield svg_text(x + wide / 2, y + 33, f"{one.mfu:.0%}", "small", "middle")
                    case float() as needed:
                        yield svg_rect(x + 1, y + 1, wide - 2, high - 2, "unfit", f"pp {pp}, tp {tp}: does not fit")
                        yield svg_text(x + wide / 2, y + 25, f"{needed / 2**30:,.0f} GiB", "soft small", "middle")

    return svg_element(top + len(cuts) * high + 6, parts(), "the fastest layout for each number of stages and of cuts")


def memory_bars(
    fitting: Sequence[LayoutResult], too_large: Sequence[LayoutResult], words: Callable[[LayoutResult], str]
) -> str:
    every = [*fitting, *too_large]
    most = max(max(one.total_bytes for one in every), every[0].device_bytes) * 1.02
    high, left, top = 34.0, 10.0, 46.0
    names = [name for name in every[0].memory if any(one.memory[name] > 0 for one in every)]

    def at(value: float) -> float:
        return left + value / most * (WIDTH - 2 * left)

    def parts() -> Iterator[str]:
        yield from svg_legend([(f"m-{name}", name) for name in names], left)
        x = at(every[0].device_bytes)
        for row, one in enumerate(every):
            y, done = top + row * (high + 14), 0.0
            yield svg_text(left, y - 3, f"{words(one)}: {format_bytes(one.total_bytes)}", "small")
            for name in names:
                value = one.memory[name]
                wide = at(done + value) - at(done)
                yield svg_rect(at(done), y, wide, high - 14, f"m-{name}", f"{name}: {format_bytes(value)}")
                done += value
            yield svg_line(x, y - 1, x, y + high - 13, "limit")  # because: further up it would cross the words
        capacity = f"the GPU has {format_bytes(every[0].device_bytes)}"
        yield svg_text(x, top + len(every) * (high + 14) + 4, capacity, "small", "end")

    return svg_element(top + len(every) * (high + 14) + 12, parts(), "bytes of the fullest rank by name")


def pipeline(one: LayoutResult) -> str:
    found, _ = timeline(one)
    ranks = shown_ranks(one.run.parallel.pp, max(_MOST_SPANS * one.run.parallel.pp // max(len(found.spans), 1), 4))
    high, left, top, total = min(26.0, 420 / len(ranks)), 60.0, 26.0, found.makespan
    scale = (WIDTH - left - 6) / total

    def parts() -> Iterator[str]:
        used = {span.action.kind for span in found.spans}
        yield from svg_legend([(f"p-{kind}", name) for kind, name in _KINDS.items() if kind in used], left)
        for row, rank in enumerate(ranks):
            y = top + row * high
            yield svg_text(left - 8, y + high * 0.7, f"rank {rank}", "soft small", "end")
            yield svg_rect(left, y, total * scale, high - 2, "idle")
            for span in found.spans:
                if span.rank == rank:
                    said = f"{_KINDS[span.action.kind]}, stage {span.action.stage}, microbatch {span.action.microbatch}"
                    wide = (span.end - span.start) * scale - 0.4
                    yield svg_rect(left + span.start * scale, y, wide, high - 2, f"p-{span.action.kind}", said)

    return svg_element(top + len(ranks) * high + 4, parts(), "what each rank of the pipeline does when")


def scaling(points: Sequence[CurvePoint]) -> str:
    """Tokens a second and GPU over the number of GPUs, with the interval; full sharding beside it."""
    shown = [(point, point.best) for point in points if point.best is not None]
    left, right, top, bottom = 70.0, 150.0, 16.0, 250.0
    high = 1.08 * max(best.tokens_per_step / best.interval_s[0] / best.gpus for _, best in shown)
    first, last = shown[0][0].gpus, shown[-1][0].gpus

    def x(gpus: int) -> float:
        return left + math.log2(gpus / first) / (math.log2(last / first) or 1.0) * (WIDTH - left - right)

    def y(value: float) -> float:
        return bottom - value / high * (bottom - top)

    def parts() -> Iterator[str]:
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            yield svg_line(left, y(share * high), WIDTH - right, y(share * high), "grid")
            yield svg_text(left - 6, y(share * high) + 4, format_count(share * high), "soft small", "end")
        fast, slow = (
            [
                f"{x(best.gpus):.1f},{y(best.tokens_per_step / best.interval_s[end] / best.gpus):.1f}"
                for _, best in shown
            ]
            for end in (0, 1)
        )
        yield f'<polygon points="{" ".join([*fast, *reversed(slow)])}" class="band"/>'
        curve = [(x(best.gpus), y(best.tokens_per_s / best.gpus)) for _, best in shown]
        yield from _line(curve, "curve", "best layout", curve[-1][1])
        plain = [(x(p.gpus), y(p.zero3_only.tokens_per_s / p.gpus)) for p, _ in shown if p.zero3_only]
        if plain:
            # because: names of two lines that end beside each other would be written over each other
            name_y = max(plain[-1][1], curve[-1][1] + _NAME_HEIGHT)
            yield from _line(plain, "curve plain", "all sharded (ZeRO 3)", name_y)
        for _, best in shown:
            parallel = best.run.parallel
            yield svg_text(x(best.gpus), bottom + 18, f"{best.gpus:,}", "small", "middle")
            yield svg_text(x(best.gpus), bottom + 34, f"pp {parallel.pp}, tp {parallel.tp}", "soft small", "middle")

    return svg_element(bottom + 44, parts(), "tokens a second and GPU over the number of GPUs")


def _line(points: Sequence[tuple[float, float]], kind: str, name: str, name_y: float) -> Iterator[str]:
    yield svg_polyline(points, kind)
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{kind}"/>' for x, y in points)
    yield svg_text(points[-1][0] + 8, name_y + 4, name, "small")


def page(found: Found) -> str:
    return build_page(title(found), _parts(found))


def _parts(found: Found) -> Iterator[str]:
    first = found.first
    yield f"<h1>{escape(title(found))}</h1>"
    yield fact_list(facts_of(found))
    if first is not None:
        yield section_heading("The best")
        yield fact_list(of_best(found, first))
        yield section_heading(
            "Layouts, fastest first" if found.by == "time" else "Layouts, least energy first",
            "80%: four runs of five take so long. Bare: time in which ranks only communicate."
        )
        yield html_table([row(found, at, one, True) for at, one in enumerate(found.best, 1)])
        for at, one in enumerate(found.best[1:3], 2):
            yield f"<p>{escape(lost(found, at, one))}.</p>"
    yield section_heading(
        "Map",
        "The fastest step for each number of stages (pp) and cuts (tp), and its MFU; four runs of five are within "
        f"{found.ranked.prices.interval:.0%} of it. Grey: what the smallest needs.",
    )
    yield layouts_map(found.cells, first, step_time)
    yield section_heading(
        "Memory of the fullest rank", "The best layouts, and below them what would be faster or misses by least."
    )
    yield memory_bars(found.best[:_MOST_BARS], found.too_large, layout_of)
    if first is not None and first.run.parallel.pp > 1:
        parallel, few = first.run.parallel, timeline(first)[1]
        layout = f"{parallel.schedule}, {parallel.pp} ranks with {parallel.vp} stages each{few}."
        yield section_heading("Pipeline", layout)
        yield pipeline(first)
    if sum(point.best is not None for point in found.points) > 1:
        yield section_heading("More GPUs", "Tokens a second and GPU. The band holds four runs of five.")
        yield scaling(found.points)
        yield html_table([row_of(point, found.by) for point in found.points])
        yield from (f"<p>{escape(line)}.</p>" for line in takeovers(found.points, found.by))
    yield '<p class="soft">Predicted by lmtrain plan. Joules are unverified, and of GPUs alone.</p>'
