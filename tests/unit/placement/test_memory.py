"""What weights cost a rank: the closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmtrain.layout import Layout
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.placement.layers_and_shards_of_ranks import place_parameters, stages_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.placement.weight_and_activation_bytes import count_elements, placements_of_stages, rank_bytes

GPT = GPTSettings(num_layers=4, width=64, num_heads=4, vocab_size=250, vocab_multiple=1, seq_len=32)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_of_an_even_model_fall_by_the_number_of_ranks(zero: int) -> None:
    """The closed forms of the ZeRO paper, with fp32 masters: nothing here needs padding."""
    settings, shards = replace(GPT, vocab_size=256), 4
    layout, total = Layout(dp_shard=shards), settings.num_parameters
    places = place_parameters(settings.weights(), settings.cuts(), layout, layout.coordinate(0), 256)
    held = rank_bytes(count_elements(places.values(), layout), layout, zero=zero, work_bytes=2)
    assert held.masters == 4 * total / shards
    assert held.optimizer == 8 * total / shards
    assert held.gradients == (4 * total if zero == 1 else 4 * total / shards)
    assert held.work == (0 if zero == 3 else 2 * total)


@pytest.mark.parametrize(("schedule", "vp"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_a_tied_head_has_a_copy_of_its_own_wherever_it_stands(schedule: str, vp: int) -> None:
    """zb_v has its first and last stage on one rank, and two copies all the same."""
    parallel = ParallelSettings(pp=2, schedule=schedule, vp=vp)
    held = [placements_of_stages(GPT, stages_of_rank(GPT, parallel, rank), parallel.layout, 0) for rank in range(2)]
    numbers = [count_elements(places, parallel.layout).parts for places in held]
    assert sum(numbers) == GPT.num_parameters + 250 * 64
    names = [place.name for places in held for place in places]
    assert [name for name in set(names) if names.count(name) == 2] == ["embedding.token.weight"]


def test_one_process_in_fp32_computes_with_its_masters() -> None:
    layout = Layout()
    places = place_parameters(GPT.weights(), GPT.cuts(), layout, layout.coordinate(0), 250)
    held = rank_bytes(count_elements(places.values(), layout), layout, zero=1, work_bytes=4)
    assert (held.work, sum(vars(held).values())) == (0, 16 * GPT.num_parameters)
