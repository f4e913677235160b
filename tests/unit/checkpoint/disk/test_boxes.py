"""Boxes: what they share, and whether they fill a tensor exactly once."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.checkpoint.disk import tensor_slice_geometry
from lmtrain.checkpoint.disk.tensor_slice_geometry import (
    Box,
    contiguous_runs,
    cover_problem,
    first_and_last_offset,
    full_box,
    intersect,
    split_box,
)


@st.composite
def shapes_and_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape of up to four axes, and boxes made by cutting it in two again and again, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    boxes = [full_box(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        first = Box(box.offset, tuple(at if i == axis else n for i, n in enumerate(box.shape)))
        offset = tuple(o + at if i == axis else o for i, o in enumerate(box.offset))
        boxes += [first, Box(offset, tuple(n - at if i == axis else n for i, n in enumerate(box.shape)))]
    return shape, draw(st.permutations(boxes))


@given(shapes_and_cuts(), st.data())
def test_cuts_cover_a_tensor_and_a_missing_or_doubled_piece_is_a_problem(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    assert cover_problem(shape, boxes) is None
    victim = data.draw(st.sampled_from([box for box in boxes if box.volume]))
    rest = list(boxes)
    rest.remove(victim)
    assert "elements" in (cover_problem(shape, rest) or "")
    assert "overlap" in (cover_problem(shape, [*boxes, victim]) or "")


small = st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 5))] * 3)


@given(small, small)
def test_intersection_is_that_of_the_elements(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> None:
    boxes = [Box(tuple(o for o, _ in pairs), tuple(n for _, n in pairs)) for pairs in (a, b)]
    marks = np.zeros((10, 10, 10), int)
    for box in boxes:
        marks[box.slices()] += 1
    common = intersect(*boxes)
    assert int((marks == 2).sum()) == (common.volume if common else 0)
    if common:
        assert (marks[common.slices()] == 2).all()


@given(st.lists(small, max_size=5))
def test_cover_agrees_with_counting(cases: list[tuple[tuple[int, int], ...]]) -> None:
    boxes = [Box(tuple(o for o, _ in pairs), tuple(n for _, n in pairs)) for pairs in cases]
    shape = (6, 5, 4)
    marks = np.zeros((12, 12, 12), int)
    for box in boxes:
        marks[box.slices()] += 1
    exact = np.zeros_like(marks)
    exact[:6, :5, :4] = 1
    inside = all(box.is_inside(shape) for box in boxes)
    assert (cover_problem(shape, boxes) is None) == (inside and bool((marks == exact).all()))


def test_scalars_have_one_element() -> None:
    assert cover_problem((), [Box((), ())]) is None
    assert "overlap" in (cover_problem((), [Box((), ()), Box((), ())]) or "")
    assert "0 of its 1" in (cover_problem((), []) or "")
    assert intersect(Box((), ()), Box((), ())) == Box((), ())


@pytest.mark.parametrize("box", [Box((0,), (5,)), Box((-1, 0), (1, 1)), Box((3, 0), (2, 4))])
def test_a_piece_outside_is_named(box: Box) -> None:
    assert "is not inside [4, 4]" in (cover_problem((4, 4), [box]) or "")


def test_covering_by_many_pieces_is_quick_to_judge() -> None:
    """A tensor cut over 3000 processes by columns: the sweep must not compare all pairs."""
    columns = [Box((0, i), (1000, 1)) for i in range(3000)]
    assert cover_problem((1000, 3000), columns) is None


def test_covering_is_judged_in_time_that_grows_with_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """However pieces lie, and also where no overlap is found to be named: along each axis here are only two starts."""
    corners = [Box(offset, (1,) * 11) for offset in itertools.product((0, 1), repeat=11)]
    assert cover_problem((2,) * 11, corners) is None
    monkeypatch.setattr(tensor_slice_geometry, "_MAX_COMPARISONS", 50)
    doubled = [*corners[:-1], corners[1000]]
    assert cover_problem((2,) * 11, doubled) == "some of its pieces overlap"


def test_parts_fill_their_box_and_are_small() -> None:
    generator = random.Random(8)
    for _ in range(200):
        shape = tuple(generator.randrange(0, 9) for _ in range(generator.randrange(0, 4)))
        most = generator.randrange(1, 60)
        parts = list(split_box(full_box(shape), most))
        assert cover_problem(shape, parts) is None
        assert all(0 < part.volume <= most for part in parts)


def test_runs_are_where_numpy_has_them() -> None:
    generator = random.Random(9)
    for _ in range(200):
        shape = tuple(generator.randrange(1, 6) for _ in range(generator.randrange(0, 4)))
        offset = tuple(generator.randrange(n) for n in shape)
        box = Box(offset, tuple(generator.randrange(1, n - o + 1) for n, o in zip(shape, offset, strict=True)))
        array = np.arange(full_box(shape).volume).reshape(shape)
        assert first_and_last_offset(box, shape) == (array[box.slices()].min(), array[box.slices()].max())
        for first, run in contiguous_runs(box, shape):
            np.testing.assert_array_equal(array[run.slices()].ravel(), np.arange(first, first + run.volume))
        assert sum(run.volume for _, run in contiguous_runs(box, shape)) == box.volume
