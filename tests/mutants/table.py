"""The tables of a measurement: a line a room, of those that people wrote also what nobody noticed."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from tests.mutants.draw import group_of
from tests.mutants.measure import COMPILER
from tests.mutants.mutant import Mutant


def table(found: list[dict[str, Any]], mutants: dict[str, Mutant]) -> str:
    """Return lines of text: room, planted, noticed by the fast tests, by the wide ones, by none, and seconds."""
    last: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for entry in found:
        if entry["mutant"] in mutants:
            last[entry["mutant"]][entry["suite"]] = entry
    rooms: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0.0])
    lines = []
    for name in mutants:
        room, suites = rooms[name.partition("/")[0]], last.get(name, {})
        room[0] += 1
        room[4] += sum(entry["seconds"] for entry in suites.values())
        if not suites:
            continue
        by = [suite for suite in ("fast", "wide") if suites.get(suite, {}).get("by")]
        room[{"fast": 1, "wide": 2}[by[0]] if by else 3] += 1
        if not by:
            reach = max(entry["reach"] for entry in suites.values())
            lines.append(f"  {name}  ({f'{reach} tests come by' if reach >= 0 else 'who comes by is not known'})")
    rows = [f"{'room':<12}{'planted':>8}{'fast':>6}{'wide':>6}{'none':>6}{'seconds':>9}"]
    total = [sum(values) for values in zip(*rooms.values(), strict=True)]
    for room_name, values in [*sorted(rooms.items()), ("all", total)]:
        rows.append(f"{room_name:<12}{values[0]:>8}{values[1]:>6}{values[2]:>6}{values[3]:>6}{values[4]:>9.0f}")
    return "\n".join([*rows, "", "unnoticed:", *lines])


def table_of_draw(found: list[dict[str, Any]], mutants: dict[str, Mutant], nothing: set[str]) -> str:
    """Return lines of text: of each room, group of rooms and all, what was drawn and by which tests it was noticed."""
    by: dict[str, dict[str, str | None]] = defaultdict(dict)  # mutant -> suite -> the test that noticed it
    for entry in found:
        by[entry["mutant"]][entry["suite"]] = entry["by"]
    rows: dict[str, list[int]] = {}
    for name, mutant in mutants.items():
        room = name.partition("/")[0]
        for row in (room, f"= {group_of(room)}", "= all"):
            counts = rows.setdefault(row, [0] * 5)
            counts[0] += 1
            if mutant.name in nothing or COMPILER in by[name].values():
                counts[1] += 1
            elif by[name]:
                counts[2 if by[name].get("fast") else 3 if any(by[name].values()) else 4] += 1
    heads = f"{'room':<16}{'drawn':>6}{'nothing':>9}{'fast':>6}{'wide':>6}{'none':>6}{'noticed':>9}   95%"
    lines = [heads]
    for row in sorted(rows, key=lambda row: (row.startswith("="), row == "= all", row)):
        drawn, none, fast, wide, missed = rows[row]
        of_all = fast + wide + missed
        low, high = interval(fast + wide, of_all)
        share = f"{(fast + wide) / of_all:>8.1%}" if of_all else f"{'-':>8}"
        lines.append(f"{row:<16}{drawn:>6}{none:>9}{fast:>6}{wide:>6}{missed:>6} {share}   {low:.0%} to {high:.0%}")
    return "\n".join(lines)


def interval(hits: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share."""
    if not count:
        return 0.0, 1.0
    z, share = 1.96, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half
