"""A chart without a browser: every point is drawn at its place, axes are those that all curves know, JSON is safe."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from lmtrain.cli.page.html_document import standalone_svg
from lmtrain.cli.page.svg_line_charts import Charts, Curve, Figure, Mark, Points, draw_figure, figure_element


def charts(log: bool = False, tokens: bool = True) -> Charts:
    steps = [1.0, 2.0, 4.0, 8.0]
    points = Points(steps, [one * 10 for one in steps] if tokens else [], steps, [8.0, 4.0, 2.0, 1.0])
    figure = Figure("loss", "Loss </script>", "number", [Curve(0, "training", points)], log=log)
    return Charts(["a"], [figure], [Mark(0, "save", 4, 40, 4.0, "saved </script>")])


def test_points_are_drawn_where_they_are() -> None:
    found = charts(log=True)
    (points,) = re.findall(r'points="([^"]*)"', draw_figure(found, found.figures[0]))
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places)]
    assert [gap / gaps[0][0] for gap, _ in gaps] == pytest.approx([1, 2, 4], abs=0.01)
    assert [down for _, down in gaps] == pytest.approx([gaps[0][1]] * 3, abs=0.2)  # halving is even on a log axis


def test_numbers_along_the_axis_end_within_the_picture() -> None:
    points = Points([100.0, 100.8], [], [], [1.0, 2.0])
    found = Charts(["a"], [Figure("loss", "Loss", "number", [Curve(0, "training", points)])])
    picture = draw_figure(found, found.figures[0], 520, 240)
    along = re.findall(r'<text x="([\d.]+)" y="216.0" class="soft small" text-anchor="middle">([^<]*)', picture)
    assert along[-1][1] == "100.8"
    for x, said in along:
        assert float(x) + 3.1 * len(said) <= 520


@pytest.mark.parametrize("value", [-3.0, 0.0, 3.0])
def test_an_axis_rises_around_a_value_that_stays_the_same(value: float) -> None:
    points = Points([1.0, 2.0], [], [], [value, value])
    found = Charts(["a"], [Figure("x", "X", "number", [Curve(0, "training", points)])])
    picture = draw_figure(found, found.figures[0])
    ticks = re.findall(r'<text x="[\d.]+" y="([\d.]+)" class="soft small" text-anchor="end">(-?[\d.]+)<', picture)
    ys, values = [float(y) for y, _ in ticks], [float(said) for _, said in ticks]
    assert len(values) > 1
    assert values == sorted(values)
    assert ys == sorted(ys, reverse=True)


def test_a_little_more_looks_like_a_little_more() -> None:
    points = Points([1.0, 2.0], [], [], [100.0, 101.0])
    one = Figure("memory_bytes", "Memory", "count", [Curve(0, "memory", points)], zero=True)
    heights = []
    for figure in (one, replace(one, zero=False)):
        (line,) = re.findall(r'points="([^"]*)"', draw_figure(Charts(["a"], [figure]), figure))
        first, last = (float(point.split(",")[1]) for point in line.split())
        heights.append(first - last)
    assert heights[0] < 5 < 40 < heights[1]


def test_axes_that_all_curves_know() -> None:
    assert charts().axes == ["tokens", "step", "seconds"]
    assert charts(tokens=False).axes == ["step", "seconds"]


def test_nothing_in_the_data_ends_its_element() -> None:
    text = charts().to_json()
    assert "<" not in text
    assert json.loads(text)["marks"] == [[0, "save", 4, 40, 4, "saved </script>"]]
    assert "</script>" not in figure_element(charts(), charts().figures[0])


def test_a_figure_with_nothing_in_it() -> None:
    assert "nothing has been recorded" in draw_figure(charts(), Figure("x", "X", "number", []))


def test_a_picture_for_a_paper_stands_alone() -> None:
    found = charts()
    text = standalone_svg(draw_figure(found, found.figures[0]))
    assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg" ')
    assert "polyline.r0 { fill: none; stroke: #2f6fb5; }" in text
    assert "var(" not in text
    assert text.count("<style>") == 1


def several(*names: str, runs: tuple[str, ...] = ("a", "b")) -> Charts:
    points = Points([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [3.0, 2.0])
    curves = [Curve(run, name, points) for name in names for run in range(len(runs))]
    return Charts(list(runs), [Figure("loss", "Loss", "number", curves)])


def test_a_run_of_one_step_is_seen() -> None:
    points = Points([1.0], [10.0], [2.0], [8.0])
    found = Charts(["a"], [Figure("loss", "Loss", "number", [Curve(0, "training", points)])])
    assert len(re.findall("<circle ", draw_figure(found, found.figures[0]))) == 1


def test_names_of_many_curves_stay_within_the_picture() -> None:
    runs = (*(f"a long name of a run, number {number}" for number in range(4)), "実験" * 80)
    found = several("training", "validation", runs=runs)
    picture = draw_figure(found, found.figures[0], 760, 360)
    names = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="soft small" text-anchor="start">([^<]*)', picture)
    assert len(names) == 10
    assert len({y for _, y, _ in names}) > 1
    for x, _, name in names:
        assert float(x) + 6 * len(name) + 6 * name.count("実") + 6 * name.count("験") < 760
    (height,) = re.findall(r'viewBox="0 0 760 (\d+)"', picture)
    assert int(height) > 360
    lowest = max(float(y) for _, y, _ in names)
    curves = re.findall(r'<polyline points="([^"]*)" class="curve r\d d0"', picture)
    assert len(curves) == 5
    for points in curves:
        assert all(lowest < float(point.split(",")[1]) < int(height) for point in points.split())


def test_curves_of_one_run_are_told_apart_where_colours_tell_runs_apart() -> None:
    def kinds(charts: Charts) -> list[str]:
        picture = draw_figure(charts, charts.figures[0])
        return re.findall(r'<polyline points="[\d.,]+ [\d.,]+" class="curve (r\d d\d)"', picture)

    assert {"r0 d0", "r1 d0", "r0 d1", "r1 d1"} == set(kinds(several("bubble", "exposed")))
    assert set(kinds(several("bubble", "exposed", runs=("a",)))) == {"r0 d0", "r1 d0"}
