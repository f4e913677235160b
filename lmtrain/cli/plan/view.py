"""What `lmtrain plan` prints: the facts, the table of layouts, why others lost, the curve, and a pipeline.

Called by the verb with what was found; it works nothing out. Good at 80 columns, with more to say at 120.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lmtrain.cli.plan.planned_run import Found
from lmtrain.cli.screen.console import Screen, print_facts, print_table
from lmtrain.cli.screen.terminal import echo, say
from lmtrain.observe.screen.row_text import percent
from lmtrain.page.document import Cells
from lmtrain.plan.run_model.replay import replay
from lmtrain.plan.search.curve import Point
from lmtrain.plan.search.result import PARTS, Answer, more, why_slower
from lmtrain.schedules.simulate import Timeline
from lmtrain.schedules.table import Kind
from lmtrain.units import format_bytes, format_count, format_seconds

_MOST_RANKS = 8
_WIDE = 110  # columns in which more is said
_WHERE_WIDE = ("80%", "bubble", "bare", "tok/s/GPU", "J/token")  # columns
_BEHIND = {"time": "is {:.1%} slower", "joules": "takes {:.1%} more energy"}
_SIGNS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "B", Kind.WEIGHT: "W"}


def print_found(found: Found) -> None:
    console = Screen()
    print_facts(title(found), facts(found))
    if found.first is None:
        return _print_too_large(console, found)
    echo()
    wide = console.width >= _WIDE
    print_table([row(found, at, one, wide) for at, one in enumerate(found.best, 1)], gap=1, spare=("slower",))
    echo()
    print_facts("the best", of_best(found, found.first))
    for at, one in enumerate(found.best[1:3], 2):
        say(console, lost(found, at, one))
    if found.too_large:
        echo()
        _print_too_large(console, found)
    if len(found.points) > 1:
        echo("\nwith more GPUs", bold=True)
        print_table([row_of(point, found.by) for point in found.points], gap=1, spare=("tok/s",))
        for line in takeovers(found.points, found.by):
            say(console, line)
    if found.first.run.parallel.pp > 1:
        echo()
        for line in picture(found.first, console.width, plain=not console.encoding.startswith("utf")):
            echo(line)
    return None


def title(found: Found) -> str:
    run, question = found.question.run, found.question
    size = format_count(run.model.num_parameters)
    return f"{run.model.kind}, {size} parameters, on {question.gpus:,} of {question.hardware.name}"


def facts(found: Found) -> Iterator[tuple[str, str]]:
    question, ranked = found.question, found.ranked
    run, hardware = question.run, question.hardware
    batch = run.global_batch * run.shape.seq_len
    yield "batch", f"{run.global_batch:,} samples of {run.shape.seq_len:,}: {format_count(batch)} tokens a step"
    nodes = -(-question.gpus // hardware.gpus_per_node)
    said = f"{nodes:,} node{'s' * (nodes > 1)} of {hardware.gpus_per_node}, {hardware.nic_GBps:g} GB/s of network each"
    yield "machine", said + ("; not checked against measured runs" if hardware.unchecked else "")
    room = format_bytes(ranked.usable)
    kinds = f"{len(ranked.space):,} are legal, {len(ranked.rows):,} of them differ in price"
    free = f"{ranked.limits.margin:.0%} of the memory stays free"
    yield "layouts", f"{kinds}, {ranked.num_fitting:,} fit in {room} ({free})"
    for said, span in found.ranges:
        yield "assumed", said + (f"; {format_count(span[0])} to {format_count(span[1])} tokens/s else" if span else "")


def row(found: Found, at: int, one: Answer, wide: bool) -> Cells:
    first, parallel, run = found.first, one.run.parallel, one.run
    assert first is not None  # because: there is a row
    cells = {
        "#": str(at), "pp": str(parallel.pp), "vp": str(parallel.vp), "tp": str(parallel.tp),
        "dp": f"{parallel.dp_replicate}x{parallel.dp_shard}", "zero": str(parallel.zero),
        "<schedule": parallel.schedule if parallel.pp > 1 else "-", "micro": str(run.micro_batch),
        "<recompute": run.recompute.words, "step": step_time(one.seconds) if wide else likely(one),
        "80%": "-".join(map(step_time, one.between)), "GiB": f"{one.held / 2**30:.1f}", "MFU": percent(one.mfu),
        "bubble": percent(one.bubble), "bare": percent(one.exposed),
        "tok/s/GPU": format_count(one.tokens_per_s / one.gpus), "J/token": f"{one.joules_per_token:.3g}",
        "slower": "" if one is first else f"{one.seconds / first.seconds - 1:+.1%}",
    }  # fmt: skip
    return {title: cell for title, cell in cells.items() if wide or title not in _WHERE_WIDE}


def lost(found: Found, at: int, one: Answer) -> str:
    """Why it is not the best."""
    first = found.first
    assert first is not None  # because: there is another
    said = f"{at} {_BEHIND[found.by].format(more(one, first, found.by))}"
    return f"{said}: {why_slower(one, first)}" if one.seconds > first.seconds else said


def step_time(seconds: float) -> str:
    return f"{seconds:.3g}s" if seconds >= 1 else f"{1000 * seconds:.3g}ms"


def likely(one: Answer) -> str:
    """A step's time, and by how much four runs of five stay within it."""
    return f"{step_time(one.seconds)}+-{one.interval:.0%}"


def of_best(found: Found, best: Answer) -> Iterator[tuple[str, str]]:
    low, high = best.between
    sure = f"{step_time(low)} to {step_time(high)} in four runs of five"
    speed = f"{format_count(best.tokens_per_s)} tokens/s, MFU {percent(best.mfu)}"
    yield "step", f"{step_time(best.seconds)} ({sure}), {speed}"
    yield "of which", shares({PARTS[name]: value for name, value in best.parts.items()}, best.seconds)
    yield "memory", f"{format_bytes(best.held)} of {format_bytes(best.room)} on the fullest rank"
    yield "of which", shares(best.memory, best.held)
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


def settings(one: Answer, *, is_whole: bool) -> Iterator[str]:
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
    say(console, "faster, and too large:" if found.first else "nothing fits. What misses by least:")
    for one in found.too_large:
        say(console, f"  {layout_of(one)}: {likely(one)}, {format_bytes(found.over(one))} too much")


def layout_of(one: Answer) -> str:
    parallel = one.run.parallel
    sizes = [f"{axis}={getattr(parallel, axis)}" for axis in ("pp", "tp", "dp_replicate", "dp_shard", "zero")]
    stages = f"{parallel.schedule} vp={parallel.vp}, " if parallel.pp > 1 else ""
    return f"{' '.join(sizes)}, {stages}microbatch {one.run.micro_batch}, recompute {one.run.recompute.words}"


def row_of(point: Point, by: str) -> Cells:
    best, plain = point.best, point.plain
    if best is None:
        return {"GPUs": f"{point.gpus:,}", "<best layout": "nothing fits"}
    parallel = best.run.parallel
    words = f"pp {parallel.pp} tp {parallel.tp} dp {parallel.dp_replicate}x{parallel.dp_shard} zero {parallel.zero}"
    return {
        "GPUs": f"{point.gpus:,}", "<best layout": words, "step": likely(best),
        "tok/s": format_count(best.tokens_per_s),
        "tok/s/GPU": format_count(best.tokens_per_s / best.gpus), "W/GPU": f"{best.watts:.0f}",
        "gain": "" if point.gain is None else f"x{point.gain:.2f}",
        "sharded": "-" if plain is None else f"{more(plain, best, by):+.1%}",
    }  # fmt: skip


def takeovers(points: Sequence[Point], by: str) -> Iterator[str]:
    """Where another layout is best than at half as many."""
    for before, point in pairwise(points):
        if point.best is None or before.best is None:
            continue
        old, new = before.best.run.parallel, point.best.run.parallel
        if (old.pp, old.tp) == (new.pp, new.tp):
            continue
        kept = point.kept and f"; as before it {_BEHIND[by].format(more(point.kept, point.best, by))}"
        yield (
            f"between {before.gpus:,} and {point.gpus:,}: pp {new.pp} and tp {new.tp} take over from pp {old.pp} and "
            f"tp {old.tp}{kept or ', which does not fit'}"
        )


def timeline(one: Answer) -> tuple[Timeline, int]:
    """A step of a few microbatches, as long as they are priced, and how many these are."""
    count = min(one.run.num_microbatches, 2 * one.run.parallel.pp)
    return replay(one.run, one.microbatch, count), count


def shown_ranks(num_ranks: int, most: int = _MOST_RANKS) -> list[int]:
    """All of them, or as many, evenly, with the first and the last."""
    if num_ranks <= most:
        return list(range(num_ranks))
    return [round(at * (num_ranks - 1) / (most - 1)) for at in range(most)]


def picture(one: Answer, width: int, *, plain: bool) -> Iterator[str]:
    found, count = timeline(one)
    total, parallel = found.makespan, one.run.parallel
    every = one.run.num_microbatches
    few = f", shown with {count} of {every} microbatches" * (count < every)
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
