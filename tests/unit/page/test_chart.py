"""A chart without a browser: every point is drawn at its place, axes are those that all curves know, JSON is safe."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from lmtrain.page.chart import Charts, Curve, Figure, Mark, Points, drawn, placed
from lmtrain.page.document import for_a_paper


def charts(log: bool = False, tokens: bool = True) -> Charts:
    steps = [1.0, 2.0, 4.0, 8.0]
    points = Points(steps, [one * 10 for one in steps] if tokens else [], steps, [8.0, 4.0, 2.0, 1.0])
    figure = Figure("loss", "Loss </script>", "number", [Curve(0, "training", points)], log=log)
    return Charts(["a"], [figure], [Mark(0, "save", 4, 40, 4.0, "saved </script>")])


def test_points_are_drawn_where_they_are() -> None:
    found = charts(log=True)
    (points,) = re.findall(r'points="([^"]*)"', drawn(found, found.figures[0]))
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places)]
    assert [gap / gaps[0][0] for gap, _ in gaps] == pytest.approx([1, 2, 4], abs=0.01)
    assert [down for _, down in gaps] == pytest.approx([gaps[0][1]] * 3, abs=0.2)  # halving is even on a log axis


def test_axes_that_all_curves_know() -> None:
    assert charts().axes == ["tokens", "step", "seconds"]
    assert charts(tokens=False).axes == ["step", "seconds"]


def test_nothing_in_the_data_ends_its_element() -> None:
    text = charts().to_json()
    assert "<" not in text
    assert json.loads(text)["marks"] == [[0, "save", 4, 40, 4, "saved </script>"]]
    assert "</script>" not in placed(charts(), charts().figures[0])


def test_a_figure_with_nothing_in_it() -> None:
    assert "nothing has been recorded" in drawn(charts(), Figure("x", "X", "number", []))


def test_a_picture_for_a_paper_stands_alone() -> None:
    found = charts()
    text = for_a_paper(drawn(found, found.figures[0]))
    assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg" ')
    assert "polyline.r0 { fill: none; stroke: #2f6fb5; }" in text
    assert "var(" not in text
    assert text.count("<style>") == 1
