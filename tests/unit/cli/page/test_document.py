"""The frame of a page: cells that may be broken, pictures that stay readable, colours that can be told apart."""

from __future__ import annotations

import re

import pytest

from lmtrain.cli.page.html_document import _DARK, _LIGHT, Picture, build_page, html_table, read_asset


def test_only_long_words_may_be_broken() -> None:
    text = html_table([{"<kernel": "aten::mm", "calls": "3"}, {"<kernel": "a" * 60, "calls": "1" * 30}])
    assert re.findall(r"<td([^>]*)>", text) == [' class="word"', "", ' class="word long"', ""]
    assert "overflow-wrap: anywhere" in re.findall(r"td\.long {[^}]*}", read_asset("report.css"))[0]


def test_a_picture_is_moved_on_a_narrow_screen_and_not_made_small() -> None:
    assert '<div class="scroll picture"><svg></svg></div>' in build_page("x", [Picture("heat", "<svg></svg>")])
    assert re.search(r"max-width: 760px\) { \.picture svg { min-width: \d{3}px", read_asset("page.css"))


@pytest.mark.parametrize("colours", [_LIGHT, _DARK])
def test_what_ran_when_has_a_colour_of_its_own(colours: dict[str, str]) -> None:
    kinds = {
        kind: colours[name]
        for some, name in re.findall(r"((?:\.t-\w+(?:, )?)+) { fill: var\(--(\w+)\)", read_asset("picture.css"))
        for kind in re.findall(r"t-(\w+)", some)
    }
    assert {"forward", "backward", "save", "measuring", "other", "bubble", "data", "optimizer"} <= kinds.keys()
    del kinds["input"]  # a backward
    assert len(set(kinds.values())) == len(kinds)
