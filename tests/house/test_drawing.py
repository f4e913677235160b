"""The drawing of the imports on its page is the one that the code draws today."""

from __future__ import annotations

from typing import Any

from tests.house.conftest import ROOT
from tests.house.drawing import draw

PAGE = ROOT / "docs" / "explanation" / "where_things_live.md"


def test_the_page_shows_todays_imports(house: Any) -> None:
    shown = PAGE.read_text(encoding="utf-8").split("<!-- drawing -->\n```text\n")[1].split("\n```")[0]
    assert shown == draw(house), "put what `python -m tests.house.drawing` prints into where_things_live.md"


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
