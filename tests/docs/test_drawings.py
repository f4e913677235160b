"""Drawings of the site: those made from the code are current, and all can be read on light and on dark pages."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs.draw_schedules import DRAWING, drawing
from tests.docs.pages import ROOT

DRAWINGS = sorted((ROOT / "docs").rglob("*.svg"))


def test_the_schedules_are_drawn_as_they_are() -> None:
    assert DRAWING.read_text("utf-8") == drawing(), "run `python -m tests.docs.draw_schedules`"


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_drawing_stands_alone_on_light_and_dark(path: Path) -> None:
    """Nothing is fetched, and text outside of boxes is neither too light for white nor too dark for black."""
    text = path.read_text("utf-8")
    root = ET.fromstring(text)  # noqa: S314
    assert "viewBox" in root.attrib
    assert not re.search(r"href|url\(|<script|<style", text)
    ink = root.attrib["fill"]
    ink = ink if len(ink) == 7 else "#" + "".join(digit * 2 for digit in ink[1:])
    for page in ("#ffffff", "#1e2129"):
        assert contrast(ink, page) > 3.5
    assert f"]({path.name})" in "".join(page.read_text("utf-8") for page in path.parent.glob("*.md"))
