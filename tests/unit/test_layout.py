"""Ranks and coordinates are two names of the same place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.errors import LayoutError
from lmtrain.layout import Coordinate, Layout, divisors, format_choices

sizes = st.integers(1, 5)
layouts = st.builds(Layout, pp=sizes, vp=sizes, dp_replicate=sizes, dp_shard=sizes, tp=sizes)


@given(layout=layouts)
def test_every_rank_has_its_own_coordinate_and_back(layout: Layout) -> None:
    places = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size == layout.pp * layout.dp * layout.tp
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))
    assert all(p.pp < layout.pp and p.dp_replicate < layout.dp_replicate for p in places)
    assert all(p.dp_shard < layout.dp_shard and p.tp < layout.tp for p in places)


@given(layout=layouts)
def test_every_data_parallel_copy_has_pp_times_tp_ranks(layout: Layout) -> None:
    copies = [layout.dp_index(rank) for rank in range(layout.world_size)]
    assert sorted(copies) == sorted(list(range(layout.dp)) * (layout.pp * layout.tp))


def test_tp_counts_fastest() -> None:
    layout = Layout(pp=2, dp_replicate=1, dp_shard=2, tp=2)
    assert [layout.coordinate(rank) for rank in (0, 1, 2, 4)] == [
        Coordinate(0, 0, 0, 0), Coordinate(0, 0, 0, 1), Coordinate(0, 0, 1, 0), Coordinate(1, 0, 0, 0)
    ]  # fmt: skip


@pytest.mark.parametrize("axis", ["pp", "vp", "dp_replicate", "dp_shard", "tp"])
def test_an_axis_below_one_is_refused_by_its_key(axis: str) -> None:
    with pytest.raises(LayoutError, match=rf"parallel\.{axis}=0 must be at least 1"):
        Layout(**{axis: 0})


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=r"There is no rank .*: the ranks of this layout are 0 to 3"):
        Layout(dp_shard=4).coordinate(rank)


def test_divisors_and_their_words() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(12, limit=4) == [1, 2, 3, 4]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(2**60) == [2**n for n in range(13)]
    assert divisors(10**12, limit=10**12)[-2:] == [5 * 10**11, 10**12]
    assert divisors(0) == divisors(-6) == []
    assert format_choices([1, 2, 4]) == "1, 2 or 4"
    assert format_choices([7]) == "7"
