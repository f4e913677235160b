"""The table of a measurement: a line a room, then what nobody noticed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

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
