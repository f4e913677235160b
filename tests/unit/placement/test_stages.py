"""Layers over stages: all of them, in order, even or by cost."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.placement.layers_and_shards_of_ranks import layers_of_stages, parameter_names_of_stages, stages_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings


@given(st.integers(0, 200), st.integers(1, 40), st.floats(0, 9))
def test_every_layer_once_and_no_stage_dearer_than_needed(num_layers: int, num_stages: int, head: float) -> None:
    runs = layers_of_stages(num_layers, num_stages, head)
    assert [layer for run in runs for layer in run] == list(range(num_layers))
    costs = [float(len(run)) for run in runs]
    costs[-1] += head
    worst = max(costs)
    cheapest = min(costs)
    # a layer of the dearest stage would make any other stage as dear, unless the dearest has none to give
    assert worst - 1 <= cheapest + 1e-9 or len(runs[costs.index(worst)]) == 0


def test_even_lengths() -> None:
    assert [len(run) for run in layers_of_stages(10, 4)] == [3, 3, 2, 2]
    assert [len(run) for run in layers_of_stages(2, 4)] == [1, 1, 0, 0]


def test_thousands_of_stages_are_one_look_at_each_layer() -> None:
    model = GPTSettings(num_layers=2048, width=8, num_heads=1, vocab_size=8, seq_len=8)
    parallel, began = ParallelSettings(pp=2048), time.process_time()
    held = [parameter_names_of_stages(model, stages_of_rank(model, parallel, rank)) for rank in range(2048)]
    assert sum(map(len, held)) == len(model.weights()) + 1  # the tied weight twice
    assert time.process_time() - began < 2


def test_a_head_takes_the_room_of_its_layers() -> None:
    assert [len(run) for run in layers_of_stages(14, 4, 2.0)] == [4, 4, 4, 2]


def test_the_stage_of_a_dear_head_has_fewer_layers() -> None:
    """And not that of the embedding, which costs nothing."""
    model = GPTSettings(num_layers=16, width=64, num_heads=4, vocab_size=4096, seq_len=32)
    parallel = ParallelSettings(pp=4, balance="cost")
    lengths = [len(stage.layers) for rank in range(4) for stage in stages_of_rank(model, parallel, rank)]
    assert sum(lengths) == 16
    assert lengths[-1] < min(lengths[:-1])
