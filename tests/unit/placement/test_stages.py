"""Layers over stages: all of them, in order, even or by cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmtrain.placement.stages import layers_of_stages


@given(st.integers(0, 200), st.integers(1, 40), st.floats(0, 9), st.floats(0, 9))
def test_every_layer_once_and_no_stage_dearer_than_needed(
    num_layers: int, num_stages: int, before: float, after: float
) -> None:
    runs = layers_of_stages(num_layers, num_stages, before, after)
    assert [layer for run in runs for layer in run] == list(range(num_layers))
    costs = [float(len(run)) for run in runs]
    costs[0] += before
    costs[-1] += after
    worst = max(costs)
    cheapest = min(costs)
    # a layer of the dearest stage would make any other stage as dear, unless the dearest has none to give
    assert worst - 1 <= cheapest + 1e-9 or len(runs[costs.index(worst)]) == 0


def test_even_lengths() -> None:
    assert [len(run) for run in layers_of_stages(10, 4)] == [3, 3, 2, 2]
    assert [len(run) for run in layers_of_stages(2, 4)] == [1, 1, 0, 0]


def test_a_head_takes_the_room_of_its_layers() -> None:
    assert [len(run) for run in layers_of_stages(14, 4, after=2.0)] == [4, 4, 4, 2]
