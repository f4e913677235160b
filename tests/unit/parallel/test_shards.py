"""A rank's part of the first weights is the same on any number of threads, in blocks of any size, cut in any way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.layout import Layout
from lmtrain.models import initial_weights
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.initialize_and_save_shards import draw_initial_values
from lmtrain.placement.layers_and_shards_of_ranks import placements_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.spec import Start

MODEL = GPTSettings(
    num_layers=2, width=48, num_heads=4, num_kv_heads=2, seq_len=16, vocab_size=131, vocab_multiple=8, tied=False
)


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def filled(layout: Layout, rank: int, num_threads: int = 1) -> dict[str, Tensor]:
    parallel = ParallelSettings(tp=layout.tp, dp_shard=layout.dp_shard)
    places = placements_of_rank(MODEL, parallel, layout.coordinate(rank))
    with torch.device("meta"):
        model: Any = MODEL.build()
    parameters = {name: torch.full(place.local_shape, 9.0) for name, place in places.items()}
    torch.set_num_threads(num_threads)
    draw_initial_values(parameters, places, model.starts(), 7)
    return parameters


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("num_threads", [2, 5])
@pytest.mark.parametrize("block_numbers", [1, 8 << 20])
def test_threads_and_blocks_change_nothing(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, block_numbers: int
) -> None:
    one = filled(Layout(), 0)
    monkeypatch.setattr(initial_weights, "_BLOCK_NUMBERS", block_numbers)
    many = filled(Layout(), 0, num_threads)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp_shard=3), Layout(tp=2, dp_shard=2)])
def test_ranks_hold_regions_of_the_whole(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    """Blocks end within regions, and regions begin within blocks."""
    whole = filled(Layout(), 0)
    monkeypatch.setattr(initial_weights, "_BLOCK_NUMBERS", 1)
    for rank in range(layout.world_size):
        parallel = ParallelSettings(tp=layout.tp, dp_shard=layout.dp_shard)
        places = placements_of_rank(MODEL, parallel, layout.coordinate(rank))
        for name, held in filled(layout, rank, 2).items():
            expected = torch.zeros_like(held)
            for region in places[name].regions:
                at = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))
                expected[region.local] = whole[name][at]
            assert torch.equal(held, expected), name


@pytest.mark.usefixtures("_threads")
def test_what_goes_wrong_in_a_thread_is_raised() -> None:
    places = placements_of_rank(MODEL, ParallelSettings(), Layout().coordinate(0))
    torch.set_num_threads(3)
    with pytest.raises(TypeError):
        draw_initial_values({name: torch.zeros(place.local_shape) for name, place in places.items()}, places, WRONG, 7)


class Wrong(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return Start(std="wide")  # type: ignore[arg-type]


WRONG = Wrong()
