"""What `lmtrain trace` prints: the step's picture, its table, the replay beside it, the critical path, who is hot, the
clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from lmtrain.cli.screen.print_facts_and_tables import PlainConsole, pick_evenly
from lmtrain.observe.screen.print_one_line import print_line
from lmtrain.observe.timeline.step_breakdown import (
    TimelineRow,
)
from lmtrain.runtime.terminal_safe_text import wrap_text
from lmtrain.start.facts_of_outputs.facts_of_trace import Facts

_CLASS_NAMES = {
    "compute": "forward and backward", "pp": "messages of stages", "dp": "collectives of dp", "tp": "collectives of tp",
    "world": "collectives of all", "bubble": "bubble", "data": "wait for data", "optimizer": "optimizer",
    "save": "checkpoints", "measuring": "validation, eval", "other": "other",
}  # fmt: skip
_SIGNS = {"forward": "F", "backward": "B", "input": "B", "weight": "W", "optimizer": "O", "data": "D", "save": "S",
          "measuring": "V", "pp": "-", "dp": "-", "tp": "-", "world": "-"}  # fmt: skip
_MAX_ROWS, _MAX_STAYS, _MAX_CELLS = 16, 12, 128
_MAX_WIDTH = 120


# ---- on the screen ---------------------------------------------------------------------------------------------------


def print_trace(facts: Facts, rows: Sequence[TimelineRow]) -> None:
    console = PlainConsole(highlight=False)
    width = min(console.width, _MAX_WIDTH) if console.is_terminal else _MAX_WIDTH
    wrap_width = width if console.is_terminal else 1 << 20  # because: elsewhere a sentence is one line, to be searched
    for line in _trace_lines(facts, rows, width, wrap_width, not console.encoding.startswith("utf")):
        if line[:1] in ("", " "):
            print_line(console, line)
        else:
            label, colon, rest = line.partition(":")
            console.print(Text.assemble((label + colon, "bold"), rest), soft_wrap=True)


def _trace_lines(facts: Facts, rows: Sequence[TimelineRow], width: int, wrap_width: int, plain: bool) -> Iterator[str]:
    yield from _wrap_indented(f"trace of {facts['run']}: {_describe_start(facts)}", wrap_width)
    if facts["steps"]:
        yield from _timeline_lines(rows, facts["path"]["step"], width, plain)
        yield from _class_table_lines(facts, width, plain)
        yield from _replay_lines(facts)
        yield from _critical_path_lines(facts, width, wrap_width)
        yield from _own_work_lines(facts, width)
        yield from _wrap_indented(_describe_clocks(facts), wrap_width)
    for note in facts["notes"]:
        yield from _wrap_indented(f"note: {note}", wrap_width)
    if facts["file"] is not None:
        yield from _wrap_indented(f"wrote: {facts['file']}; ui.perfetto.dev and chrome://tracing open it", wrap_width)


def _wrap_indented(text: str, width: int) -> Iterator[str]:
    first, *more = wrap_text(text, width - 2).splitlines()
    yield first
    yield from (f"  {line}" for line in more)


def _shown_start(facts: Facts) -> Facts:
    """Return the entry of `facts["starts"]` for the start of the run that is shown."""
    return next(start for start in facts["starts"] if start["start"] == facts["start"])


def _describe_start(facts: Facts) -> str:
    start = _shown_start(facts)
    sizes = [f"{axis} {size}" for axis, size in start["layout"].items() if size > 1]
    hosts = f"{len(start['hosts'])} hosts" if len(start["hosts"]) > 1 else f"host {start['hosts'][0]}"
    total = f" of {start['world_size']}" if start["ranks"] != start["world_size"] else ""
    ranks = f"{start['ranks']}{total} rank{'s' * (start['world_size'] > 1)} on {hosts}"
    number = f"start {start['start']}" + (f" of {len(facts['starts'])}" if len(facts["starts"]) > 1 else "")
    schedule = [start["schedule"]] * (start["layout"]["pp"] > 1)
    steps = f"steps {_format_ranges(facts['steps'])}" if facts["steps"] else "no whole step"
    return ", ".join([number, ranks, *sizes, *schedule, steps])


def _format_ranges(numbers: Sequence[int]) -> str:
    """Return the ascending numbers as ranges: 10, 11, 12, 20 -> "10-12, 20". Of six ranges or more, only the first
    three and the last are written, with "..." between.
    """
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = ([number for _, number in group] for _, group in groups)
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(texts if len(texts) < 6 else [*texts[:3], "...", texts[-1]])


def _format_s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


def _timeline_lines(rows: Sequence[TimelineRow], step: int, width: int, plain: bool) -> Iterator[str]:
    """Yield the lines of a text drawing of one step: a line for each rank, in which each letter stands for the kind of
    work that took most of that slice of time, and a legend. They are `width` characters wide; `plain` allows only
    ASCII. Yield nothing if no row has bars.
    """
    ranks = sorted({row.rank for row in rows})
    end = max((bar.end_s for row in rows for bar in row.bars), default=0.0)
    if not end:
        return
    shown = [ranks[index] for index in pick_evenly(len(ranks), _MAX_ROWS)]
    note = "" if shown == ranks else f", {len(shown)} of {len(ranks)} ranks"
    yield f"step {step} as it ran: {_format_s(end)}{note}"
    gap, columns, used_signs = "." if plain else "·", width - 7, set[str]()
    for rank in shown:
        shares: list[Counter[str]] = [Counter() for _ in range(columns)]
        for bar in (bar for row in rows if row.rank == rank for bar in row.bars):
            sign = _SIGNS.get(bar.what, gap)
            low, high = bar.begin_s / end * columns, bar.end_s / end * columns
            for column in range(int(low), min(int(high) + 1, columns)):
                shares[column][sign] += max(min(high, column + 1) - max(low, column), 0.0)  # type: ignore[assignment]
        line = "".join(share.most_common(1)[0][0] if share else " " for share in shares)
        used_signs |= set(line)
        yield f"{rank:>5}  {line}".rstrip()
    legend = {"F": "forward", "B": "backward", "W": "weights' gradients", "-": "communication", "D": "data",
              "O": "optimizer", "S": "checkpoint", "V": "validation", gap: "waits"}  # fmt: skip
    entries = ", ".join(f"{sign} {word}" for sign, word in legend.items() if sign in used_signs)
    yield from _wrap_indented(" " * 7 + entries, width)


def _class_table_lines(facts: Facts, width: int, plain: bool) -> Iterator[str]:
    num_steps = len(facts["steps"])
    yield f"where a step's time goes: mean of {num_steps} step{'s' * (num_steps > 1)} and all ranks"
    classes = {name: entry for name, entry in facts["classes"].items() if entry["seconds"] > 0}
    for name, entry in classes.items():
        has_wait = name in ("dp", "tp", "world") and entry["waited_s"] > facts["step_s"] / 1000
        wait = f"  {_format_s(entry['waited_s'])} of it waiting for slower ranks" if has_wait else ""
        bar = ("#" if plain else "█") * round(entry["share"] * (width - 48))
        line = f"  {_CLASS_NAMES[name]:<22}{_format_s(entry['seconds']):>11}{entry['share']:>8.1%}  {bar}"
        yield from (f"{line}{wait}".rstrip(),) if len(line) + len(wait) <= width else (line, f"  {wait}")
    total_share = sum(entry["share"] for entry in classes.values())
    yield f"  {'step':<22}{_format_s(facts['step_s']):>11}{total_share:>8.1%}"


def _replay_lines(facts: Facts) -> Iterator[str]:
    found = facts["replay"]
    if found is None:
        return
    yield (
        f"beside the table of {_shown_start(facts)['schedule']}: {found['num_microbatches']} microbatches, replayed "
        "with these costs"
    )
    yield f"  {'':<22}{'measured':>11}{'replayed':>11}{'even stages':>14}"
    yield f"  {'pipeline':<22}{_format_s(found['pipeline_s']):>11}{_format_s(found['replayed_pipeline_s']):>11}"
    measured, replayed, even = (found[key] for key in ("bubble_s", "replayed_bubble_s", "even_bubble_s"))
    yield f"  {'bubble and messages':<22}{_format_s(measured):>11}{_format_s(replayed):>11}{_format_s(even):>14}"
    rows = found["by_pp"]
    for pp, (own, other) in enumerate(rows if len(rows) <= _MAX_ROWS else []):
        yield f"  {f'  of pp {pp}':<22}{_format_s(own):>11}{_format_s(other):>11}"


def _critical_path_lines(facts: Facts, width: int, wrap_width: int) -> Iterator[str]:
    path = facts["path"]
    shares = sorted(path["classes"].items(), key=lambda pair: -pair[1])
    min_s = path["seconds"] / 1000
    phrases = [f"{_CLASS_NAMES[name]} {_format_s(seconds)}" for name, seconds in shares if seconds >= min_s]
    yield f"critical path of step {path['step']}: {_format_s(path['seconds'])}, which nothing beside it can shorten"
    yield from (f"  {line}" for line in _wrap_indented(", ".join(phrases), wrap_width - 2))
    stays = [list(group) for _, group in groupby(path["hops"], lambda hop: hop["rank"])]
    fits, half = len(stays) <= _MAX_STAYS, _MAX_STAYS // 2
    lines = [_describe_stay(hops, min_s, width) for hops in (stays if fits else stays[:half] + stays[-half:])]
    if not fits:
        lines.insert(half, f"  ... {len(stays) - 2 * half} more; --json lists them all")
    yield from lines


def _describe_stay(hops: Sequence[Facts], min_s: float, width: int) -> str:
    """Return a line about one stay of the critical path on a rank, given its successive entries there (`hops`): begin
    time, rank, pipeline stages, and the kinds of work that took at least `min_s` seconds. The shortest are left out of
    a line longer than `width`.
    """
    seconds_by_kind: dict[str, list[float]] = {}
    for hop in hops:
        seconds_by_kind.setdefault(hop["kind"], []).append(hop["seconds"])
    longest_first = sorted(seconds_by_kind.items(), key=lambda pair: -sum(pair[1]))
    parts = [
        f"{f'{len(durations)} x ' if len(durations) > 1 else ''}{kind} {_format_s(sum(durations))}"
        for kind, durations in longest_first
        if sum(durations) >= min_s
    ]
    while len(parts) > 1 and 35 + len(", ".join(parts)) > width:
        parts.pop()
    stages = sorted({hop["stage"] for hop in hops if hop["stage"] >= 0 and hop["kind"] != "send"})
    place = f"rank {hops[0]['rank']}" + (f", stage {', '.join(map(str, stages))}" if stages else "")
    return f"  {'at ' + _format_s(hops[0]['begin_s']):<14}{place:<19}{', '.join(parts)}"


def _own_work_lines(facts: Facts, width: int) -> Iterator[str]:
    """Yield a table of how long each rank computes (waits not counted), in percent of the median of the ranks with the
    same pipeline stages: a row for each pp and dp, a column for each tp. If it is too large, list the ten slowest ranks
    instead; yield nothing if fewer than two ranks are known.
    """
    cells = {(entry["pp"], entry["dp"], entry["tp"]): entry for entry in facts["heat"]}
    known = [entry for entry in facts["heat"] if entry["ratio"] is not None]
    if len(known) < 2:
        return
    yield "own work: 100 is the median of the ranks with the same stages"
    tps = sorted({tp for _, _, tp in cells})
    if len(cells) <= _MAX_CELLS and 24 + 6 * len(tps) <= width:
        yield f"  {'':<14}" + "".join(f"{f'tp {tp}':>6}" for tp in tps) + "   host"
        for pp, dp in sorted({(pp, dp) for pp, dp, _ in cells}):
            row = [cells.get((pp, dp, tp)) for tp in tps]
            shown = "".join(
                f"{'-' if entry is None or entry['ratio'] is None else round(100 * entry['ratio']):>6}" for entry in row
            )
            hosts = dict.fromkeys(entry["host"] for entry in row if entry is not None)
            yield f"  {f'pp {pp}, dp {dp}':<14}{shown}   {', '.join(hosts)}"
    else:
        for entry in sorted(known, key=lambda entry: -entry["ratio"])[:10]:
            at = f"pp {entry['pp']}, dp {entry['dp']}, tp {entry['tp']}"
            yield f"  {round(100 * entry['ratio']):>5}  rank {entry['rank']:<6}{at:<24}{entry['host']}"
    if len(facts["hosts"]) > 1:
        yield "own work by host: median and largest"
        for host, entry in [*facts["hosts"].items()][:10]:
            ratios = f"{round(100 * entry['median']):>5}{round(100 * entry['largest']):>6}"
            yield f"  {ratios}  {host} ({entry['ranks']} ranks)"


def _describe_clocks(facts: Facts) -> str:
    clocks = facts["clocks"]
    if len(clocks) < 2:
        return "clocks: one rank, as its own clock says"
    ahead, drift, doubt = (max(abs(clock[key]) for clock in clocks) for key in ("ahead_s", "drift_ppm", "doubt_ms"))
    return (
        f"clocks: up to {_format_s(ahead)} and {drift:.0f} ppm off rank {clocks[0]['rank']}'s, set by what ranks "
        f"exchanged, which agrees within {doubt:.2f} ms"
    )
