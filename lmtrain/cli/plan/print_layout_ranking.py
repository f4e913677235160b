"""Output of `lmtrain plan`: facts, a table of layouts, why others are slower, the scaling curve, a pipeline.

On a terminal (80 columns, more columns of the table from 110 on), and as one HTML page with pictures. This module only
shows the results of plan_question_and_search.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from lmtrain.cli.page.html_document import (
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
from lmtrain.cli.screen.print_facts_and_tables import PlainConsole, pick_evenly, print_facts, print_table
from lmtrain.cli.screen.print_messages_and_json import echo, print_message
from lmtrain.observe.screen.metrics_row_text import format_percent
from lmtrain.plan.search.predict_layout_cost import (
    STEP_PARTS,
    CurvePoint,
    LayoutResult,
    excess_share,
    simulate_step,
    why_slower,
)
from lmtrain.start.plans.plan_question_and_search import PlanResult
from lmtrain.units import format_bytes, format_count, format_seconds

_MAX_RANKS = 8
_WIDE = 110  # characters from which the table shows more columns
_WIDE_COLUMNS = ("80%", "bubble", "bare", "tok/s/GPU", "J/token")  # shown only on wide terminals
_EXCESS_TEXT = {"time": "is {:.1%} slower", "joules": "takes {:.1%} more energy"}
_KIND_NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "weights' gradients"}
_MAX_SPANS = 2500  # because: a page with more opens slowly
_MAX_BARS = 5
_NAME_HEIGHT = 14.0  # of a line's name in a picture


def print_plan(result: PlanResult) -> None:
    """Print the result of `lmtrain plan` on the terminal: the ranked layouts, the best one in detail, and the scaling
    to more GPUs.
    """
    console = PlainConsole()
    print_facts(plan_title(result), plan_lines(result))
    if result.first is None:
        _print_too_large(console, result)
        return
    echo()
    wide = console.width >= _WIDE
    rows = [layout_row(result, position, layout, wide) for position, layout in enumerate(result.best, 1)]
    print_table(rows, gap=1, optional_columns=("slower",))
    echo()
    print_facts("the best", best_lines(result, result.first))
    for position, layout in enumerate(result.best[1:3], 2):
        print_message(console, describe_difference(result, position, layout))
    if result.too_large:
        echo()
        _print_too_large(console, result)
    if len(result.points) > 1:
        echo("\nwith more GPUs", bold=True)
        print_table([scaling_row(point, result.by) for point in result.points], gap=1, optional_columns=("tok/s",))
        for line in takeover_lines(result.points, result.by):
            print_message(console, line)
    if result.first.run.parallel.pp > 1:
        ascii_only = not console.encoding.startswith("utf")
        echo("\n".join(["", *pipeline_text(result.first, console.width, ascii_only=ascii_only)]))


def plan_title(result: PlanResult) -> str:
    """Return a page or table title: the model, its number of parameters, and the number and name of the GPUs."""
    run, question = result.question.run, result.question
    size = format_count(run.model.num_parameters)
    return f"{run.model.kind}, {size} parameters, on {question.gpus:,} x {question.hardware.name}"


def plan_lines(result: PlanResult) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the head of a plan: the batch, the machine, the number of layouts searched, and each
    assumption with its effect.
    """
    question, ranked = result.question, result.ranked
    run, hardware = question.run, question.hardware
    batch = run.global_batch * run.shape.seq_len
    yield "batch", f"{run.global_batch:,} samples of {run.shape.seq_len:,}: {format_count(batch)} tokens a step"
    nodes = -(-question.gpus // hardware.gpus_per_node)
    text = f"{nodes:,} node{'s' * (nodes > 1)} of {hardware.gpus_per_node}, {hardware.nic_GBps:g} GB/s of network each"
    yield "machine", text + ("; not checked against measured runs" if hardware.unchecked else "")
    yield "layouts", (
        f"{len(ranked.space):,} are legal, {len(ranked.rows):,} of them differ in price, {ranked.num_fitting:,} fit in "
        f"{format_bytes(ranked.usable_bytes)} ({ranked.limits.margin:.0%} of the memory stays free)"
    )
    for text, span in result.ranges:
        yield "assumed", text + (f"; {format_count(span[0])} to {format_count(span[1])} tokens/s else" if span else "")


def layout_row(result: PlanResult, position: int, layout: LayoutResult, all_columns: bool) -> Cells:
    """Return the row of `layout` in the table of ranked layouts, as column title -> text. `position` is its rank from
    1; `all_columns=False` leaves out the columns for which only a wide terminal has room.
    """
    first, parallel, run = result.best[0], layout.run.parallel, layout.run
    cells = {
        "#": str(position), "pp": str(parallel.pp), "vp": str(parallel.vp), "tp": str(parallel.tp),
        "dp": f"{parallel.dp_replicate}x{parallel.dp_shard}", "zero": str(parallel.zero),
        "<schedule": parallel.schedule if parallel.pp > 1 else "-", "micro": str(run.micro_batch),
        "<recompute": run.recompute.words,
        "step": format_step_time(layout.seconds) if all_columns else format_step_interval(layout),
        "80%": "-".join(map(format_step_time, layout.interval_s)), "GiB": f"{layout.total_bytes / 2**30:.1f}",
        "MFU": format_percent(layout.mfu),
        "bubble": format_percent(layout.bubble_share), "bare": format_percent(layout.exposed_share),
        "tok/s/GPU": format_count(layout.tokens_per_s / layout.gpus), "J/token": f"{layout.joules_per_token:.3g}",
        "slower": "" if layout is first else f"{layout.seconds / first.seconds - 1:+.1%}",
    }  # fmt: skip
    return {title: cell for title, cell in cells.items() if all_columns or title not in _WIDE_COLUMNS}


def describe_difference(result: PlanResult, position: int, layout: LayoutResult) -> str:
    """Return a sentence that says by how much, and why, `layout` is slower or takes more energy than the best. It
    begins with `position`, the layout's rank from 1.
    """
    first = result.best[0]
    text = f"{position} {_EXCESS_TEXT[result.by].format(excess_share(layout, first, result.by))}"
    return f"{text}: {why_slower(layout, first)}" if layout.seconds > first.seconds else text


def format_step_time(seconds: float) -> str:
    """Format seconds with three digits, as in 1.23s or 45.6ms."""
    if seconds >= 1000:
        return format_seconds(seconds)
    return f"{seconds:.3g}s" if seconds >= 1 else f"{1000 * seconds:.3g}ms"


def format_step_interval(layout: LayoutResult) -> str:
    """Return a step's time with its 80% interval, as in "1.2s±5%"."""
    return f"{format_step_time(layout.seconds)}±{layout.interval:.0%}"


def best_lines(result: PlanResult, best: LayoutResult) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the details of the best layout: step time, memory, duration of the run, energy, cost,
    save interval, and the overrides that choose it.
    """
    low, high = best.interval_s
    yield "step", (
        f"{format_step_time(best.seconds)} ({format_step_time(low)} to {format_step_time(high)} in four runs of five), "
        f"{format_count(best.tokens_per_s)} tokens/s, MFU {format_percent(best.mfu)}"
    )
    yield "of which", format_shares({STEP_PARTS[name]: value for name, value in best.parts.items()}, best.seconds)
    capacity = format_bytes(best.hardware.memory_bytes)
    yield "memory", f"{format_bytes(best.total_bytes)} of {capacity} on the fullest rank"
    yield "of which", format_shares(best.memory, best.total_bytes)
    tokens, megawatt_hours = result.question.tokens or 0, ""
    if duration := result.duration(best):
        likely_s, low_s, high_s = map(format_days, duration)
        yield "all tokens", f"{format_count(tokens)} in {likely_s} ({low_s} to {high_s}), without saves"
        megawatt_hours = f", {tokens * best.joules_per_token / 3.6e9:.3g} MWh"
    yield "energy", f"{best.joules_per_token:.3g} J/token{megawatt_hours}; unverified, GPUs alone"
    if cost := result.dollars(best):
        yield "cost", f"${cost[0]:,.0f} (${cost[1]:,.0f} to ${cost[2]:,.0f})"
    if save_interval := result.save_interval_s:
        shortest, longest = map(format_seconds, save_interval)
        yield "save every", f"{shortest} to {longest}, by Young and Daly"
    yield "settings", " ".join(pretrain_overrides(best, includes_defaults=result.question.has_layout))


def pretrain_overrides(layout: LayoutResult, *, includes_defaults: bool) -> Iterator[str]:
    """Yield the overrides, such as "parallel.tp=8", with which `lmtrain pretrain` trains in this layout. Parallel sizes
    equal to their defaults are left out unless `includes_defaults` is set.
    """
    default, parallel = type(layout.run.parallel)(), layout.run.parallel
    for name in ("pp", "vp", "dp_replicate", "dp_shard", "tp", "zero", "sequence_parallel", "schedule", "balance"):
        value = getattr(parallel, name)
        if includes_defaults or value != getattr(default, name):
            yield f"parallel.{name}={str(value).lower()}"
    yield f"train.micro_batch={layout.run.micro_batch}"
    yield f"train.global_batch={layout.run.global_batch}"
    yield from layout.run.recompute.settings
    if includes_defaults and getattr(layout.run.recompute, "blocks", 0) is None:
        yield "recompute.blocks=null"
    yield f"precision={layout.run.precision.kind}"


def format_shares(parts: Mapping[str, float], total: float) -> str:
    """Format parts of a total as percentages, largest first; parts below 0.5% are left out."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value / total:.0%}" for name, value in ordered if value >= 0.005 * total)


def format_days(seconds: float) -> str:
    """Format seconds as days if they are at least one day."""
    return f"{seconds / 86400:.3g} days" if seconds >= 86400 else format_seconds(seconds)


def _print_too_large(console: Any, result: PlanResult) -> None:
    """Print the result's `too_large` layouts, each with the bytes by which its memory exceeds what is usable on a GPU.
    """
    print_message(console, "faster, and too large:" if result.first else "nothing fits. What misses by least:")
    for layout in result.too_large:
        excess = format_bytes(result.excess_bytes(layout))
        print_message(console, f"  {describe_layout(layout)}: {format_step_interval(layout)}, {excess} too much")


def describe_layout(layout: LayoutResult) -> str:
    """Return a layout as one line of text: its parallel sizes, pipeline schedule, micro-batch size and recompute
    setting.
    """
    parallel = layout.run.parallel
    sizes = [f"{axis}={getattr(parallel, axis)}" for axis in ("pp", "tp", "dp_replicate", "dp_shard", "zero")]
    stages = f"{parallel.schedule} vp={parallel.vp}, " if parallel.pp > 1 else ""
    return f"{' '.join(sizes)}, {stages}microbatch {layout.run.micro_batch}, recompute {layout.run.recompute.words}"


def scaling_row(point: CurvePoint, by: str) -> Cells:
    """Return the table row for a point of the scaling curve, which is the best layout on some number of GPUs, as column
    title -> text. If none fits, the row says so. `by` is the objective, "time" or "joules".
    """
    best, plain = point.best, point.zero3_only
    if best is None:
        return {"GPUs": f"{point.gpus:,}", "<best layout": "nothing fits"}
    parallel = best.run.parallel
    words = f"pp {parallel.pp} tp {parallel.tp} dp {parallel.dp_replicate}x{parallel.dp_shard} zero {parallel.zero}"
    return {
        "GPUs": f"{point.gpus:,}", "<best layout": words, "step": format_step_interval(best),
        "tok/s": format_count(best.tokens_per_s),
        "tok/s/GPU": format_count(best.tokens_per_s / best.gpus), "W/GPU": f"{best.watts:.0f}",
        "gain": "" if point.gain is None else f"x{point.gain:.2f}",
        "sharded": "-" if plain is None else f"{excess_share(plain, best, by):+.1%}",
    }  # fmt: skip


def takeover_lines(points: Sequence[CurvePoint], by: str) -> Iterator[str]:
    """Yield a sentence for each two successive points of the scaling curve whose best layouts differ in pp or tp; it
    says how much worse the former pp and tp would be. `by` is the objective, "time" or "joules".
    """
    for previous, point in pairwise(points):
        if point.best is None or previous.best is None:
            continue
        old, new = previous.best.run.parallel, point.best.run.parallel
        if (old.pp, old.tp) == (new.pp, new.tp):
            continue
        same = point.same_cut
        excess_of_old = same and f"; as before it {_EXCESS_TEXT[by].format(excess_share(same, point.best, by))}"
        yield (
            f"between {previous.gpus:,} and {point.gpus:,}: pp {new.pp} and tp {new.tp} take over from pp {old.pp} and "
            f"tp {old.tp}{excess_of_old or ', which does not fit'}"
        )


def pipeline_text(layout: LayoutResult, width: int, *, ascii_only: bool) -> Iterator[str]:
    """Yield the lines of a text drawing of one simulated step: a heading, a line for each pipeline rank with a letter
    for what it computes at each time, and a legend. Lines are at most `width` characters wide.
    """
    timeline, note = simulate_step(layout)
    total, parallel = timeline.makespan, layout.run.parallel
    yield f"pipeline: {parallel.schedule}, {parallel.pp} ranks x {parallel.vp}{note}"
    gap, columns = "." if ascii_only else "·", min(width, 120) - 6
    for rank in pick_evenly(parallel.pp, _MAX_RANKS):
        cells = [gap] * columns
        for span in timeline.spans:
            if span.rank == rank:
                first, last = int(span.start / total * columns), int(span.end / total * columns)
                for column in range(first, max(min(last, columns), first + 1)):
                    cells[min(column, columns - 1)] = span.action.kind.replace("I", "B")
        yield f"{rank:>4}  {''.join(cells)}".rstrip()
    yield f"      F forward, B backward, W weights' gradients, {gap} waits"


def layout_map_svg(
    cells: dict[tuple[int, int], LayoutResult | float], best: LayoutResult | None, format_time: Callable[[float], str]
) -> str:
    """Return an SVG with a cell for each pair of pp and tp that shows the step time of the best layout with these. The
    closer that is to the best of all, the darker the cell. `format_time` formats seconds.

    `cells` maps (pp, tp) to the best layout, or to the bytes that the smallest layout needs if none fits.
    """
    stages, tensor_sizes = sorted({pp for pp, _ in cells}), sorted({tp for _, tp in cells})
    width, height, left, top = min((WIDTH - 70) / len(stages), 120.0), 42.0, 60.0, 30.0

    def parts() -> Iterator[str]:
        for column, pp in enumerate(stages):
            yield svg_text(left + (column + 0.5) * width, top - 8, f"pp {pp}", "soft", "middle")
        for row, tp in enumerate(tensor_sizes):
            yield svg_text(left - 8, top + (row + 0.6) * height, f"tp {tp}", "soft", "end")
            for column, pp in enumerate(stages):
                x, y = left + column * width, top + row * height
                match cells.get((pp, tp)):
                    case LayoutResult() as layout:
                        tooltip = f"pp {pp}, tp {tp}: {format_time(layout.seconds)}, {format_bytes(layout.total_bytes)}"
                        share = best.seconds / layout.seconds if best else 1.0
                        style = f"fill-opacity:{0.7 * max(share, 0.06) ** 2:.3f}"
                        css_class = "best" if layout.seconds == (best and best.seconds) else "fits"
                        yield svg_rect(x + 1, y + 1, width - 2, height - 2, css_class, tooltip, style)
                        yield svg_text(x + width / 2, y + 18, format_time(layout.seconds), anchor="middle")
                        yield svg_text(x + width / 2, y + 33, f"{layout.mfu:.0%}", "small", "middle")
                    case float() as needed:
                        yield svg_rect(x + 1, y + 1, width - 2, height - 2, "unfit", f"pp {pp}, tp {tp}: does not fit")
                        yield svg_text(x + width / 2, y + 25, f"{needed / 2**30:,.0f} GiB", "soft small", "middle")

    return svg_element(
        top + len(tensor_sizes) * height + 6, parts(), "the fastest layout for each number of stages and of cuts"
    )


def memory_bars_svg(
    fitting: Sequence[LayoutResult], too_large: Sequence[LayoutResult], describe: Callable[[LayoutResult], str]
) -> str:
    """Return an SVG with a bar for each layout: the memory of its fullest rank, divided by use (weights, activations,
    ...), with a line at the GPU's capacity. `describe` returns a layout's label.
    """
    layouts = [*fitting, *too_large]
    max_bytes = max(max(layout.total_bytes for layout in layouts), layouts[0].hardware.memory_bytes) * 1.02
    height, left, top = 34.0, 10.0, 46.0
    names = [name for name in layouts[0].memory if any(layout.memory[name] > 0 for layout in layouts)]

    def to_x(value: float) -> float:
        return left + value / max_bytes * (WIDTH - 2 * left)

    def parts() -> Iterator[str]:
        yield from svg_legend([(f"m-{name}", name) for name in names], left)
        x = to_x(layouts[0].hardware.memory_bytes)
        for row, layout in enumerate(layouts):
            y, used = top + row * (height + 14), 0.0
            yield svg_text(left, y - 3, f"{describe(layout)}: {format_bytes(layout.total_bytes)}", "small")
            for name in names:
                value = layout.memory[name]
                width = to_x(used + value) - to_x(used)
                yield svg_rect(to_x(used), y, width, height - 14, f"m-{name}", f"{name}: {format_bytes(value)}")
                used += value
            yield svg_line(x, y - 1, x, y + height - 13, "limit")  # because: a longer line would cross the text above
        capacity = f"the GPU has {format_bytes(layouts[0].hardware.memory_bytes)}"
        yield svg_text(x, top + len(layouts) * (height + 14) + 4, capacity, "small", "end")

    return svg_element(top + len(layouts) * (height + 14) + 12, parts(), "bytes of the fullest rank by name")


def pipeline_svg(layout: LayoutResult) -> str:
    """Return an SVG of one simulated step: for each pipeline rank a row that shows what it computes over time. Of many
    ranks, some evenly spaced ones are drawn.
    """
    timeline, _ = simulate_step(layout)
    num_stages = layout.run.parallel.pp
    ranks = pick_evenly(num_stages, max(_MAX_SPANS * num_stages // max(len(timeline.spans), 1), 4))
    height, left, top, total = min(26.0, 420 / len(ranks)), 60.0, 26.0, timeline.makespan
    scale = (WIDTH - left - 6) / total

    def parts() -> Iterator[str]:
        kinds = {span.action.kind for span in timeline.spans}
        yield from svg_legend([(f"p-{kind}", name) for kind, name in _KIND_NAMES.items() if kind in kinds], left)
        for row, rank in enumerate(ranks):
            y = top + row * height
            yield svg_text(left - 8, y + height * 0.7, f"rank {rank}", "soft small", "end")
            yield svg_rect(left, y, total * scale, height - 2, "idle")
            for span in timeline.spans:
                if span.rank == rank:
                    action = span.action
                    tooltip = f"{_KIND_NAMES[action.kind]}, stage {action.stage}, microbatch {action.microbatch}"
                    width = (span.end - span.start) * scale - 0.4
                    yield svg_rect(left + span.start * scale, y, width, height - 2, f"p-{span.action.kind}", tooltip)

    return svg_element(top + len(ranks) * height + 4, parts(), "what each rank of the pipeline does when")


def scaling_svg(points: Sequence[CurvePoint]) -> str:
    """Return an SVG of tokens per second per GPU over the number of GPUs: a curve of the best layouts with their 80%
    intervals, and one of the best layouts with ZeRO 3 and no pp or tp.
    """
    fitting = [(point, point.best) for point in points if point.best is not None]
    left, right, top, bottom = 70.0, 150.0, 16.0, 250.0
    max_value = 1.08 * max(best.tokens_per_step / best.interval_s[0] / best.gpus for _, best in fitting)
    first, last = fitting[0][0].gpus, fitting[-1][0].gpus

    def x(gpus: int) -> float:
        return left + math.log2(gpus / first) / (math.log2(last / first) or 1.0) * (WIDTH - left - right)

    def y(value: float) -> float:
        return bottom - value / max_value * (bottom - top)

    def parts() -> Iterator[str]:
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            yield svg_line(left, y(share * max_value), WIDTH - right, y(share * max_value), "grid")
            yield svg_text(left - 6, y(share * max_value) + 4, format_count(share * max_value), "soft small", "end")
        fast, slow = (
            [
                f"{x(best.gpus):.1f},{y(best.tokens_per_step / best.interval_s[end] / best.gpus):.1f}"
                for _, best in fitting
            ]
            for end in (0, 1)
        )
        yield f'<polygon points="{" ".join([*fast, *reversed(slow)])}" class="band"/>'
        curve = [(x(best.gpus), y(best.tokens_per_s / best.gpus)) for _, best in fitting]
        yield from _labelled_curve(curve, "curve", "best layout", curve[-1][1])
        sharded = [(x(p.gpus), y(p.zero3_only.tokens_per_s / p.gpus)) for p, _ in fitting if p.zero3_only]
        if sharded:
            # because: the names of two lines that end close to each other would overlap
            name_y = max(sharded[-1][1], curve[-1][1] + _NAME_HEIGHT)
            yield from _labelled_curve(sharded, "curve plain", "all sharded (ZeRO 3)", name_y)
        for _, best in fitting:
            parallel = best.run.parallel
            yield svg_text(x(best.gpus), bottom + 18, f"{best.gpus:,}", "small", "middle")
            yield svg_text(x(best.gpus), bottom + 34, f"pp {parallel.pp}, tp {parallel.tp}", "soft small", "middle")

    return svg_element(bottom + 44, parts(), "tokens a second and GPU over the number of GPUs")


def _labelled_curve(points: Sequence[tuple[float, float]], css_class: str, name: str, name_y: float) -> Iterator[str]:
    """Yield the SVG elements of a curve through `points` (x, y in pixels): a line, a dot at each point, and the text
    `name` at its right end, at height `name_y` in pixels.
    """
    yield svg_polyline(points, css_class)
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{css_class}"/>' for x, y in points)
    yield svg_text(points[-1][0] + 8, name_y + 4, name, "small")


def plan_page(result: PlanResult) -> str:
    """Return the result of a plan as an HTML page."""
    return build_page(plan_title(result), _page_parts(result))


def _page_parts(result: PlanResult) -> Iterator[str]:
    """Yield the HTML of the page of a plan, from top to bottom, as one string per element."""
    first = result.first
    yield f"<h1>{escape(plan_title(result))}</h1>"
    yield fact_list(plan_lines(result))
    if first is not None:
        yield section_heading("The best")
        yield fact_list(best_lines(result, first))
        yield section_heading(
            "Layouts, fastest first" if result.by == "time" else "Layouts, least energy first",
            "80%: four runs of five take so long. Bare: time in which ranks only communicate."
        )
        yield html_table([layout_row(result, position, layout, True) for position, layout in enumerate(result.best, 1)])
        for position, layout in enumerate(result.best[1:3], 2):
            yield f"<p>{escape(describe_difference(result, position, layout))}.</p>"
    yield section_heading(
        "Map",
        "The fastest step for each number of stages (pp) and cuts (tp), and its MFU; four runs of five are within "
        f"{result.ranked.cost_model.interval:.0%} of it. Grey: what the smallest needs.",
    )
    yield layout_map_svg(result.cells, first, format_step_time)
    yield section_heading(
        "Memory of the fullest rank", "The best layouts, and below them what would be faster or misses by least."
    )
    yield memory_bars_svg(result.best[:_MAX_BARS], result.too_large, describe_layout)
    if first is not None and first.run.parallel.pp > 1:
        parallel, note = first.run.parallel, simulate_step(first)[1]
        yield section_heading(
            "Pipeline", f"{parallel.schedule}, {parallel.pp} ranks with {parallel.vp} stages each{note}."
        )
        yield pipeline_svg(first)
    if sum(point.best is not None for point in result.points) > 1:
        yield section_heading("More GPUs", "Tokens a second and GPU. The band holds four runs of five.")
        yield scaling_svg(result.points)
        yield html_table([scaling_row(point, result.by) for point in result.points])
        yield from (f"<p>{escape(line)}.</p>" for line in takeover_lines(result.points, result.by))
    yield '<p class="soft">Predicted by lmtrain plan. Joules are unverified, and of GPUs alone.</p>'
