"""What `lmtrain trace` says: facts as plain data, and on a screen.

The step's picture, its table, the replay beside it, the critical path, who is hot, the clocks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np
from rich.text import Text

from lmtrain.cli.screen.console import PlainConsole
from lmtrain.errors import UsageError, join_few
from lmtrain.observe.safe_text import wrap_text
from lmtrain.observe.screen.training_view import print_line
from lmtrain.observe.timeline.merge import Segment, Timeline
from lmtrain.observe.timeline.step_time import (
    CLASSES,
    Hop,
    StepTimes,
    TimelineRow,
    critical_path,
    heat_by_host,
    rank_heat,
    step_times,
    timeline_rows,
)
from lmtrain.plan.trace_comparison import compare_with_replay

Facts = dict[str, Any]

_WORDS = {
    "compute": "forward and backward", "pp": "messages of stages", "dp": "collectives of dp", "tp": "collectives of tp",
    "world": "collectives of all", "bubble": "bubble", "data": "wait for data", "optimizer": "optimizer",
    "save": "checkpoints", "measuring": "validation, eval", "other": "other",
}  # fmt: skip
_SIGNS = {"forward": "F", "backward": "B", "input": "B", "weight": "W", "optimizer": "O", "data": "D", "save": "S",
          "measuring": "V", "pp": "-", "dp": "-", "tp": "-", "world": "-"}  # fmt: skip
_MOST_ROWS, _MOST_STAYS, _MOST_CELLS = 16, 12, 128
_WIDEST = 120


def trace_facts(timeline: Timeline, start: int | None, step: int | None) -> tuple[Facts, list[TimelineRow]]:
    """Return the facts, and the bars of the step that is looked at."""
    segment = _chosen(timeline, start)
    facts: Facts = {
        "run": str(timeline.folder),
        "starts": [
            {"start": one.start, "layout": asdict(one.layout), "schedule": one.schedule, "ranks": len(one.headers),
             "world_size": one.layout.world_size, "hosts": one.hosts, "num_microbatches": one.num_microbatches,
             "steps": one.steps, "spans": int(one.spans.size)}
            for one in timeline.segments
        ],
        "notes": [*timeline.notes, *(note for one in timeline.segments for note in one.notes)],
    }
    if not segment.steps:
        if step is not None:
            raise UsageError(f"--step={step} is not there: no step of start {segment.start} was recorded to its end.")
        facts["notes"].append(f"start {segment.start}: no step was recorded to its end, so there are no tables")
        return facts | {"start": segment.start, "steps": []}, []
    if step is not None and step not in segment.steps:
        raise UsageError(
            f"--step={step} is not among the steps that start {segment.start} recorded: "
            f"{join_few(map(str, segment.steps), max_shown=12)}. Choose one of them, or another --start."
        )
    times = step_times(segment)
    longest = np.nanmax(times.seconds.sum(axis=2), axis=1)
    median = times.steps[int(np.argsort(longest, kind="stable")[(len(times.steps) - 1) // 2])]
    chosen = median if step is None else step
    found, beside = rank_heat(segment, times), compare_with_replay(segment, times)
    facts |= {
        "start": segment.start,
        "steps": segment.steps,
        "step_s": float(np.nanmean(times.seconds.sum(axis=2))),
        "classes": _classes(times),
        # because: classes are called pp, dp and tp too, and a rank's place would be gone behind their seconds
        "by_rank": [
            {"rank": rank, "at": _at(segment, rank), "host": segment.headers[rank].host}
            | {name: _number(float(value)) for name, value in zip(CLASSES, row, strict=True)}
            for rank, row in zip(times.ranks, times.by_rank(), strict=True)
        ],
        "replay": None if beside is None else asdict(beside),
        "path": _path(chosen, critical_path(segment, chosen)),
        "heat": [
            {"rank": one.rank, **_at(segment, one.rank), "host": one.host, "own_work_s": _number(one.own_work_s),
             "ratio": _number(one.ratio)}
            for one in found
        ],
        "hosts": {
            host: {"ranks": count, "median": usual, "largest": most}
            for host, (count, usual, most) in heat_by_host(found).items()
        },
        "clocks": _clocks(segment),
    }  # fmt: skip
    return facts, timeline_rows(segment, chosen)


def _chosen(timeline: Timeline, start: int | None) -> Segment:
    """Return the start with this number; without one, the newest that has a whole step, else the newest."""
    if start is None:
        return next((one for one in reversed(timeline.segments) if one.steps), timeline.segments[-1])
    if (chosen := next((one for one in timeline.segments if one.start == start), None)) is not None:
        return chosen
    raise UsageError(
        f"--start={start} has left no trace in {timeline.folder}. Choose one of these: "
        f"{join_few((str(one.start) for one in timeline.segments), max_shown=12)}."
    )


def _at(segment: Segment, rank: int) -> Facts:
    at = segment.coordinate(rank)
    return {"pp": at.pp, "dp": at.dp_replicate * segment.layout.dp_shard + at.dp_shard, "tp": at.tp}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _classes(times: StepTimes) -> Facts:
    mean, waited = times.mean(), times.mean_waited()
    whole = sum(mean.values())
    return {
        name: {"seconds": mean[name], "share": mean[name] / whole if whole else 0.0, "waited_s": waited[name]}
        for name in CLASSES
    }


def _path(step: int, hops: Sequence[Hop]) -> Facts:
    classes: defaultdict[str, float] = defaultdict(float)
    ranks: defaultdict[int, float] = defaultdict(float)
    for hop in hops:
        classes[hop.class_] += hop.seconds
        ranks[hop.rank] += hop.seconds
    return {
        "step": step, "seconds": hops[-1].end_s if hops else 0.0, "classes": dict(classes),
        "ranks": {str(rank): seconds for rank, seconds in sorted(ranks.items())},
        "hops": [
            {"rank": hop.rank, "stage": hop.stage, "microbatch": hop.microbatch, "kind": hop.kind, "class": hop.class_,
             "begin_s": hop.begin_s, "seconds": hop.seconds}
            for hop in hops
        ],
    }  # fmt: skip


def _clocks(segment: Segment) -> list[Facts]:
    """Return how far each rank's clock is ahead of the first rank's at most, and how it drifts."""
    found = []
    for i, rank in enumerate(segment.ranks):
        ahead = [-float(one.offset_ns[i]) / 1e9 for one in segment.clocks]
        found.append({
            "rank": rank, "ahead_s": max(ahead, key=abs, default=0.0),
            "drift_ppm": -1e6 * float(np.median([one.rate[i] for one in segment.clocks])) if segment.clocks else 0.0,
            "doubt_ms": max((float(one.doubt_ns[i]) / 1e6 for one in segment.clocks), default=0.0),
            "linked": all(bool(one.linked[i]) for one in segment.clocks),
        })  # fmt: skip
    return found


# ---- on the screen ---------------------------------------------------------------------------------------------------


def print_trace(facts: Facts, rows: Sequence[TimelineRow]) -> None:
    console = PlainConsole(highlight=False)
    width = min(console.width, _WIDEST) if console.is_terminal else _WIDEST
    fold = width if console.is_terminal else 1 << 20  # because: elsewhere a sentence is one line, to be searched
    for line in _lines(facts, rows, width, fold, not console.encoding.startswith("utf")):
        if line[:1] in ("", " "):
            print_line(console, line)
        else:
            head, colon, rest = line.partition(":")
            console.print(Text.assemble((head + colon, "bold"), rest), soft_wrap=True)


def _lines(facts: Facts, rows: Sequence[TimelineRow], width: int, fold: int, plain: bool) -> Iterator[str]:
    yield from _folded(f"trace of {facts['run']}: {_head(facts)}", fold)
    if facts["steps"]:
        yield from _picture(rows, facts["path"]["step"], width, plain)
        yield from _table(facts, width, plain)
        yield from _replay(facts)
        yield from _critical(facts, width, fold)
        yield from _heat(facts, width)
        yield from _folded(_clocks_words(facts), fold)
    for note in facts["notes"]:
        yield from _folded(f"note: {note}", fold)
    if facts["file"] is not None:
        yield from _folded(f"wrote: {facts['file']}; ui.perfetto.dev and chrome://tracing open it", fold)


def _folded(text: str, width: int) -> Iterator[str]:
    first, *more = wrap_text(text, width - 2).splitlines()
    yield first
    yield from (f"  {line}" for line in more)


def _start(facts: Facts) -> Facts:
    """Return the start of the run that is shown."""
    return next(one for one in facts["starts"] if one["start"] == facts["start"])


def _head(facts: Facts) -> str:
    one = _start(facts)
    cuts = [f"{axis} {size}" for axis, size in one["layout"].items() if size > 1]
    hosts = f"{len(one['hosts'])} hosts" if len(one["hosts"]) > 1 else f"host {one['hosts'][0]}"
    of = f" of {one['world_size']}" if one["ranks"] != one["world_size"] else ""
    ranks = f"{one['ranks']}{of} rank{'s' * (one['world_size'] > 1)} on {hosts}"
    which = f"start {one['start']}" + (f" of {len(facts['starts'])}" if len(facts["starts"]) > 1 else "")
    about = [which, ranks, *cuts, *[one["schedule"]] * (one["layout"]["pp"] > 1)]
    return ", ".join([*about, f"steps {_ranges(facts['steps'])}" if facts["steps"] else "no whole step"])


def _ranges(numbers: Sequence[int]) -> str:
    """10, 11, 12, 20 -> 10-12, 20; of many, the first and the last."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = ([number for _, number in group] for _, group in groups)
    found = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(found if len(found) < 6 else [*found[:3], "...", found[-1]])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


def _picture(rows: Sequence[TimelineRow], step: int, width: int, plain: bool) -> Iterator[str]:
    """Draw a row for each rank; each column shows what took most of its time."""
    ranks = sorted({row.rank for row in rows})
    end = max((bar.end_s for row in rows for bar in row.bars), default=0.0)
    if not end:
        return
    most = min(len(ranks), _MOST_ROWS)
    shown = [ranks[round(i * (len(ranks) - 1) / max(most - 1, 1))] for i in range(most)]
    few = "" if shown == ranks else f", {len(shown)} of {len(ranks)} ranks"
    yield f"step {step} as it ran: {_ms(end)}{few}"
    gap, columns, seen = "." if plain else "·", width - 7, set[str]()
    for rank in shown:
        shares: list[Counter[str]] = [Counter() for _ in range(columns)]
        for bar in (bar for row in rows if row.rank == rank for bar in row.bars):
            sign = _SIGNS.get(bar.what, gap)
            low, high = bar.begin_s / end * columns, bar.end_s / end * columns
            for at in range(int(low), min(int(high) + 1, columns)):
                shares[at][sign] += max(min(high, at + 1) - max(low, at), 0.0)  # type: ignore[assignment]
        line = "".join(share.most_common(1)[0][0] if share else " " for share in shares)
        seen |= set(line)
        yield f"{rank:>5}  {line}".rstrip()
    legend = {"F": "forward", "B": "backward", "W": "weights' gradients", "-": "communication", "D": "data",
              "O": "optimizer", "S": "checkpoint", "V": "validation", gap: "waits"}  # fmt: skip
    yield from _folded(" " * 7 + ", ".join(f"{sign} {word}" for sign, word in legend.items() if sign in seen), width)


def _table(facts: Facts, width: int, plain: bool) -> Iterator[str]:
    num = len(facts["steps"])
    yield f"where a step's time goes: mean of {num} step{'s' * (num > 1)} and all ranks"
    classes = {name: one for name, one in facts["classes"].items() if one["seconds"] > 0}
    room = width - 48
    for name, one in classes.items():
        late = name in ("dp", "tp", "world") and one["waited_s"] > facts["step_s"] / 1000
        wait = f"  {_ms(one['waited_s'])} of it waiting for slower ranks" if late else ""
        bar = ("#" if plain else "█") * round(one["share"] * room)
        line = f"  {_WORDS[name]:<22}{_ms(one['seconds']):>11}{one['share']:>8.1%}  {bar}"
        yield from (f"{line}{wait}".rstrip(),) if len(line) + len(wait) <= width else (line, f"  {wait}")
    yield f"  {'step':<22}{_ms(facts['step_s']):>11}{sum(one['share'] for one in classes.values()):>8.1%}"


def _replay(facts: Facts) -> Iterator[str]:
    found = facts["replay"]
    if found is None:
        return
    beside = f"beside the table of {_start(facts)['schedule']}"
    yield f"{beside}: {found['num_microbatches']} microbatches, replayed with these costs"
    yield f"  {'':<22}{'measured':>11}{'replayed':>11}{'even stages':>14}"
    yield f"  {'pipeline':<22}{_ms(found['pipeline_s']):>11}{_ms(found['replayed_pipeline_s']):>11}"
    measured, replayed, even = (found[key] for key in ("bubble_s", "replayed_bubble_s", "even_bubble_s"))
    yield f"  {'bubble and messages':<22}{_ms(measured):>11}{_ms(replayed):>11}{_ms(even):>14}"
    rows = found["by_pp"]
    for pp, (own, other) in enumerate(rows if len(rows) <= _MOST_ROWS else []):
        yield f"  {f'  of pp {pp}':<22}{_ms(own):>11}{_ms(other):>11}"


def _critical(facts: Facts, width: int, fold: int) -> Iterator[str]:
    path = facts["path"]
    shares = sorted(path["classes"].items(), key=lambda pair: -pair[1])
    words = [f"{_WORDS[name]} {_ms(seconds)}" for name, seconds in shares if seconds >= path["seconds"] / 1000]
    yield f"critical path of step {path['step']}: {_ms(path['seconds'])}, which nothing beside it can shorten"
    yield from (f"  {line}" for line in _folded(", ".join(words), fold - 2))
    stays = [list(group) for _, group in groupby(path["hops"], lambda hop: hop["rank"])]
    few, half = len(stays) <= _MOST_STAYS, _MOST_STAYS // 2
    lines = [_stay(hops, path["seconds"] / 1000, width) for hops in (stays if few else stays[:half] + stays[-half:])]
    if not few:
        lines.insert(half, f"  ... {len(stays) - 2 * half} more; --json lists them all")
    yield from lines


def _stay(hops: Sequence[Facts], least_s: float, width: int) -> str:
    """Return in words what the critical path does on a rank before it moves to another."""
    long: dict[str, list[float]] = {}
    for hop in hops:
        long.setdefault(hop["kind"], []).append(hop["seconds"])
    most = sorted(long.items(), key=lambda pair: -sum(pair[1]))
    parts = [
        f"{f'{len(of)} x ' if len(of) > 1 else ''}{kind} {_ms(sum(of))}" for kind, of in most if sum(of) >= least_s
    ]
    while len(parts) > 1 and 35 + len(", ".join(parts)) > width:
        parts.pop()
    stages = sorted({hop["stage"] for hop in hops if hop["stage"] >= 0 and hop["kind"] != "send"})
    where = f"rank {hops[0]['rank']}" + (f", stage {', '.join(map(str, stages))}" if stages else "")
    return f"  {'at ' + _ms(hops[0]['begin_s']):<14}{where:<19}{', '.join(parts)}"


def _heat(facts: Facts, width: int) -> Iterator[str]:
    """Draw the ranks' own work as a table: a row's ranks share pp and dp; 100 is the median of the same stages."""
    cells = {(one["pp"], one["dp"], one["tp"]): one for one in facts["heat"]}
    known = [one for one in facts["heat"] if one["ratio"] is not None]
    if len(known) < 2:
        return
    yield "own work: 100 is the median of the ranks with the same stages"
    tps = sorted({tp for _, _, tp in cells})
    if len(cells) <= _MOST_CELLS and 24 + 6 * len(tps) <= width:
        yield f"  {'':<14}" + "".join(f"{f'tp {tp}':>6}" for tp in tps) + "   host"
        for pp, dp in sorted({(pp, dp) for pp, dp, _ in cells}):
            row = [cells.get((pp, dp, tp)) for tp in tps]
            shown = "".join(
                f"{'-' if one is None or one['ratio'] is None else round(100 * one['ratio']):>6}" for one in row
            )
            hosts = dict.fromkeys(one["host"] for one in row if one is not None)
            yield f"  {f'pp {pp}, dp {dp}':<14}{shown}   {', '.join(hosts)}"
    else:
        for one in sorted(known, key=lambda one: -one["ratio"])[:10]:
            at = f"pp {one['pp']}, dp {one['dp']}, tp {one['tp']}"
            yield f"  {round(100 * one['ratio']):>5}  rank {one['rank']:<6}{at:<24}{one['host']}"
    if len(facts["hosts"]) > 1:
        yield "own work by host: median and largest"
        for host, one in [*facts["hosts"].items()][:10]:
            yield f"  {round(100 * one['median']):>5}{round(100 * one['largest']):>6}  {host} ({one['ranks']} ranks)"


def _clocks_words(facts: Facts) -> str:
    clocks = facts["clocks"]
    if len(clocks) < 2:
        return "clocks: one rank, as its own clock says"
    ahead, drift, doubt = (max(abs(one[key]) for one in clocks) for key in ("ahead_s", "drift_ppm", "doubt_ms"))
    return (
        f"clocks: up to {_ms(ahead)} and {drift:.0f} ppm off rank {clocks[0]['rank']}'s, set by what ranks exchanged, "
        f"which agrees within {doubt:.2f} ms"
    )
