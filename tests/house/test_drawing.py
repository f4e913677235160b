"""The drawing of the imports is the one that the code draws today, and the map has every room with its wings."""

from __future__ import annotations

import re
from typing import Any

from tests.house.conftest import ROOT
from tests.house.drawing import draw

PAGES = ROOT / "docs" / "explanation"
ROW = re.compile(r"^\| `([\w/]+)/` \| [^|]* \| ([\w, ]*)\|$", re.MULTILINE)  # room, what it answers, wings


def test_the_page_shows_todays_imports(house: Any) -> None:
    page = (PAGES / "who_imports_whom.md").read_text(encoding="utf-8")
    shown = page.split("<!-- drawing -->\n```text\n")[1].split("\n```")[0]
    assert shown == draw(house), "put what `python -m tests.house.drawing` prints into who_imports_whom.md"


def wings_of(house: Any) -> dict[str, list[str]]:
    """Of each room, by its path."""
    folders = [module.path.parent.relative_to(house.root) for module in house.modules.values() if module.is_package]
    rooms = [one for one in folders if len(one.parts) == (2 if one.parts[0] == "lmtrain" else 1)]
    return {room.as_posix(): sorted(one.name for one in folders if one.parent == room) for room in rooms}


def test_the_map_has_every_room_with_its_wings(house: Any) -> None:
    page = (PAGES / "where_things_live.md").read_text(encoding="utf-8")
    assert {room: wings.replace(",", " ").split() for room, wings in ROW.findall(page)} == wings_of(house)


def test_a_wing_that_the_map_lacks_is_found(planted: Any) -> None:
    tree = planted({"lmtrain/__init__.py": "", "lmtrain/data/__init__.py": "", "lmtrain/data/store/__init__.py": ""})
    assert wings_of(tree) == {"lmtrain/data": ["store"]}


def test_a_wing_and_an_arrow_are_drawn(planted: Any) -> None:
    tree = planted(
        {
            "lmtrain/data/__init__.py": '"""Data."""\n',
            "lmtrain/data/store/__init__.py": '"""Store."""\n',
            "lmtrain/data/samples/__init__.py": '"""Samples."""\n',
            "lmtrain/data/samples/a.py": "import lmtrain.data.store.b\nimport lmtrain.errors\n",
            "lmtrain/data/store/b.py": "",
            "lmtrain/errors.py": "",
        }
    )
    lines = [" ".join(line.split()) for line in draw(tree).splitlines()]
    assert "data -> errors" in lines
    assert "samples/ -> store" in lines
    assert "store/" in lines
