"""Over all ranks of any layout, owned blocks tile each parameter once, and what a rank holds tiles its own tensor."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.layout import Layout
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.placement.layers_and_shards_of_ranks import (
    Placement,
    Shape,
    num_saved_regions,
    place_parameters,
    saved_regions,
    shard_rows,
)
from lmtrain.spec import Cut, Cuts, Split

VOCAB = 13


@st.composite
def models(draw: st.DrawFn) -> tuple[Layout, dict[str, Shape], Cuts]:
    """Parameters of every split, with sizes that need not divide by anything but tp where the split wants it."""
    layout = Layout(
        dp_replicate=draw(st.integers(1, 3)), dp_shard=draw(st.integers(1, 4)), tp=draw(st.integers(1, 3))
    )
    shapes: dict[str, Shape] = {"table": (draw(st.integers(VOCAB, 20)), draw(st.integers(1, 3)))}
    shapes["scores"] = shapes["table"][:1]
    cuts = {"table": Cut(Split.VOCAB), "scores": Cut(Split.VOCAB)}
    for number in range(draw(st.integers(1, 4))):
        sections = tuple(layout.tp * size for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        more = draw(st.sampled_from([(), (2,), (2, 3)]))
        shapes[f"column{number}"] = (sum(sections), *more)
        cuts[f"column{number}"] = Cut(Split.COLUMN, sections if len(sections) > 1 or draw(st.booleans()) else ())
        shapes[f"row{number}"] = (draw(st.integers(1, 5)), layout.tp * draw(st.integers(1, 3)))
        cuts[f"row{number}"] = Cut(Split.ROW)
        shapes[f"uncut{number}"] = (draw(st.integers(1, 5)), *more)
    return layout, shapes, cuts


def places_of(layout: Layout, shapes: dict[str, Shape], cuts: Cuts) -> list[dict[str, Placement]]:
    return [place_parameters(shapes, cuts, layout, layout.coordinate(rank), VOCAB) for rank in range(layout.world_size)]


@settings(max_examples=60, deadline=None)
@given(models())
def test_owned_blocks_tile_the_whole_once(model: tuple[Layout, dict[str, Shape], Cuts]) -> None:
    ranks = places_of(*model)
    for name, place in ranks[0].items():
        saved, held = np.zeros(place.global_shape, int), np.zeros(place.global_shape, int)
        for places in ranks:
            for block in places[name].regions:
                at = tuple(slice(o, o + n) for o, n in zip(block.offset, block.shape, strict=True))
                held[at] += 1
                saved[at] += places[name].is_owner
        assert (saved == 1).all()
        assert (held == place.num_holders).all()


@settings(max_examples=60, deadline=None)
@given(models())
def test_blocks_tile_the_true_rows_of_what_a_rank_holds(model: tuple[Layout, dict[str, Shape], Cuts]) -> None:
    for places in places_of(*model):
        for place in places.values():
            local = np.zeros(place.local_shape, int)
            for block in place.regions:
                assert local[block.local].shape == block.shape
                local[block.local] += 1
            assert local.max(initial=0) <= 1
            padding = place.cut.split is Split.VOCAB
            assert padding or (local == 1).all()
            # padding stands at the end
            filled = local.reshape(len(local), -1).all(axis=1) if local.size else np.zeros(0, bool)
            assert (np.diff(filled.astype(int)) <= 0).all()


@settings(max_examples=30, deadline=None)
@given(models())
def test_what_is_saved_is_known_without_asking_each_rank(model: tuple[Layout, dict[str, Shape], Cuts]) -> None:
    layout, shapes, cuts = model
    ranks = places_of(*model)
    for name, shape in shapes.items():
        owned = [block for places in ranks if places[name].is_owner for block in places[name].regions]
        known = list(saved_regions(shape, cuts.get(name, Cut(Split.NONE)), layout, VOCAB))
        assert {(block.offset, block.shape) for block in known} == {(block.offset, block.shape) for block in owned}
        assert len(known) == len(owned) == num_saved_regions(shape, cuts.get(name, Cut(Split.NONE)), layout, VOCAB)


def test_a_fused_weight_is_cut_section_by_section() -> None:
    """Four queries' rows, two keys', two values': the second of two ranks holds the second half of each."""
    layout = Layout(dp_shard=2, tp=2)
    cuts = {"qkv": Cut(Split.COLUMN, (4, 2, 2))}
    place = place_parameters({"qkv": (8, 5)}, cuts, layout, layout.coordinate(1), VOCAB)["qkv"]
    assert place.part_shape == (4, 5)
    assert [block.offset for block in place.regions] == [(2, 0)]  # the first shard is the rank's two query rows
    other = place_parameters({"qkv": (8, 5)}, cuts, layout, layout.coordinate(3), VOCAB)["qkv"]
    assert [block.offset for block in other.regions] == [(5, 0), (7, 0)]


def test_shards_are_equal_but_for_the_last() -> None:
    assert [len(shard_rows(10, 4, index)) for index in range(4)] == [3, 3, 3, 1]
    assert [len(shard_rows(2, 4, index)) for index in range(4)] == [1, 1, 0, 0]


GPT = GPTSettings(num_layers=4, width=64, num_heads=4, vocab_size=250, vocab_multiple=1, seq_len=32)


def test_saving_is_shared_among_those_who_hold_the_same() -> None:
    layout = Layout(dp_replicate=4, tp=2)
    written = [
        sum(math.prod(block.shape) for place in places.values() if place.is_owner for block in place.regions)
        for places in places_of_gpt(layout)
    ]
    assert sum(written) == GPT.num_parameters
    assert max(written) < 1.3 * GPT.num_parameters / layout.world_size


def places_of_gpt(layout: Layout) -> list[dict[str, Placement]]:
    return [
        place_parameters(GPT.weights(), GPT.cuts(), layout, layout.coordinate(rank), 250)
        for rank in range(layout.world_size)
    ]
