"""A drawing of the house from its own imports: floors from the roof down, rooms, wings, and what each of them imports.

    python -m tests.house.drawing          what docs/explanation/who_imports_whom.md shows; a test keeps it current

An arrow points at what is imported, and to the same floor or up there is none: tests/house/test_floors.py sees to that.
"""

from __future__ import annotations

import tomllib
from textwrap import wrap
from typing import Any

from tests.house.conftest import ROOT, House
from tests.house.test_floors import room_of, wing_of


def arrows(house: Any, name_of: Any, within: str | None = None) -> dict[str, set[str]]:
    """Who imports whom, by the names that `name_of` returns; `within` a room alone, or between rooms."""
    found: dict[str, set[str]] = {}
    for name, module in house.modules.items():
        if within is not None and room_of(name) != within:
            continue
        here = name_of(name)
        found.setdefault(here, set())
        for item in house.imports(module):
            ours = item.target in house.modules and (within is None or room_of(item.target) == within)
            if ours and name_of(item.target) not in ("", here):
                found[here].add(name_of(item.target))
    return found


def wings(house: Any, room: str) -> list[str]:
    """A line for each wing of a room, those first that import others."""
    folders = {wing_of(name) for name, module in house.modules.items() if module.is_package and room_of(name) == room}
    folders = {folder for folder in folders if folder.rpartition(".")[0] in ("lmtrain." + room, room)}
    inside = arrows(house, wing_of, room)
    lines = []
    for wing in sorted(folders, key=lambda wing: (-len(inside[wing] & folders), wing)):
        seen = sorted(other.rpartition(".")[2] for other in inside[wing] & folders)
        lines.append(f"    {wing.rpartition('.')[2]}/".ljust(22) + (f"-> {', '.join(seen)}" if seen else ""))
    return [line.rstrip() for line in lines]


def draw(house: Any) -> str:
    between, lines = arrows(house, room_of), []
    floors = [*house.rules["floors"]]
    readers = house.rules["may_import_data_tools"]
    below = next(number for number, rooms in enumerate(floors) if {*rooms} & {*readers}) - 1
    for number in range(len(floors) - 1, -1, -1):
        lines.append(f"floor {number + 1}")
        rooms = [room for room in floors[number] if room in between]
        for room in ["data_tools"] * (number == below and "data_tools" in between) + rooms:
            seen = f"-> {', '.join(sorted(between[room]))}" if between[room] else ""
            lines += wrap(f"  {room}".ljust(16) + seen, 118, subsequent_indent=" " * 19, drop_whitespace=True)
            lines += wings(house, room)
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    print(draw(House(ROOT, tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lmtrain"])))
