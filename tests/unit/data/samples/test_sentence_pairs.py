"""Maps of sentence samples: Megatron-LM's bit for bit, lmtrain's a function of the document, C++ equal to Python."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmtrain.data.samples.group_sentences_into_samples import _mersenne_32, _mersenne_64, build_map, build_megatron_map
from lmtrain.runtime import compiled_helpers

Ints = NDArray[Any]

LENGTHS = np.array([6, 5, 7, 4, 4, 10, 3, 9, 8], np.int32)
BOUNDS = np.array([0, 3, 5, 9])
SHAPE: dict[str, Any] = {"max_tokens": 12, "short_share": 0.1, "min_sentences": 2, "seed": 1234}


def corpus(num_documents: int, seed: int = 0) -> tuple[Ints, Ints]:
    random = np.random.default_rng(seed)
    bounds = np.concatenate([[0], np.cumsum(random.integers(0, 30, num_documents))])
    return random.integers(1, 50, bounds[-1]).astype(np.int32), bounds


@pytest.fixture(params=["native", "twin"])
def _either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "twin":
        monkeypatch.setattr(compiled_helpers, "lib", None)
    elif compiled_helpers.lib is None:
        pytest.skip("lmtrain._native was not compiled")


@pytest.mark.usefixtures("_either")
def test_megatrons_samples() -> None:
    """The vector was made by Megatron-LM's own helpers.cpp."""
    rows = build_megatron_map(LENGTHS, BOUNDS, **SHAPE)
    assert rows.tolist() == [[5, 7, 12], [0, 3, 12], [3, 5, 12], [7, 9, 12]]
    assert rows.dtype == np.uint32


@pytest.mark.usefixtures("_either")
def test_megatrons_epochs_are_whole_and_as_many_as_are_needed() -> None:
    assert [len(build_megatron_map(LENGTHS, BOUNDS, num_samples=n, **SHAPE)) for n in (1, 4, 5, 9)] == [4, 4, 8, 12]


@pytest.mark.usefixtures("_either")
def test_megatrons_one_in_so_many_is_the_nearest_whole_number() -> None:
    """Documents have one sentence here, and the generator is asked twice for each: before it and behind it."""
    drawn, max_tokens = np.array(list(islice(_mersenne_32(5), 0, 600, 2))), 1000
    short_targets = 2 + drawn % (max_tokens - 1)
    for short_share, one_in in ((0.15, 7), (0.1, 10), (0.3, 3), (0.4, 3)):
        shape: dict[str, Any] = {"max_tokens": max_tokens, "short_share": short_share, "min_sentences": 1, "seed": 5}
        rows = build_megatron_map(np.full(300, 9), np.arange(301), **shape)
        targets = rows[np.argsort(rows[:, 0]), 2]
        assert targets.tolist() == np.where(drawn % one_in == 0, short_targets, max_tokens).tolist()


def test_the_mersenne_twisters() -> None:
    assert list(islice(_mersenne_32(1234), 5)) == [822569775, 2137449171, 2671936806, 3512589365, 1880026316]
    assert list(islice(_mersenne_64(1235), 3)) == [12475983374653888083, 573922149886606219, 5802434057304372554]
    assert next(islice(_mersenne_64(5489), 9999, None)) == 9981545732273789042  # the C++ standard's own check


@pytest.mark.usefixtures("_either")
def test_megatron_leaves_out_documents_with_a_long_sentence() -> None:
    lengths = LENGTHS.copy()
    lengths[4] = 512
    assert [3, 5] in build_megatron_map(lengths, BOUNDS, **SHAPE)[:, :2].tolist()
    lengths[4] = 513
    assert [3, 5] not in build_megatron_map(lengths, BOUNDS, **SHAPE)[:, :2].tolist()
    assert [3, 5] in build_map(lengths, BOUNDS, **SHAPE)[:, :2].tolist()
    lengths[:] = 600
    assert len(build_megatron_map(lengths, BOUNDS, num_samples=10, **SHAPE)) == 0


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), max_size=10),
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(2, 100),
    short_share=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    min_sentences=st.integers(1, 3),
    num_samples=st.none() | st.integers(1, 60),
    long=st.booleans(),
)
def test_the_twins_say_the_same(
    counts: list[int],
    seed: int,
    max_tokens: int,
    short_share: float,
    min_sentences: int,
    num_samples: int | None,
    long: bool,
) -> None:
    bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    lengths = np.random.default_rng(seed).integers(0, 600 if long else 60, bounds[-1]).astype(np.int32)
    shape: dict[str, Any] = {
        "max_tokens": max_tokens, "short_share": short_share, "min_sentences": min_sentences, "seed": seed
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        here = build_map(lengths, bounds, **shape)
        megatron = build_megatron_map(lengths, bounds, num_samples=num_samples, **shape)
        patch.setattr(compiled_helpers, "lib", None)
        assert build_map(lengths, bounds, **shape).tolist() == here.tolist()
        twin = build_megatron_map(lengths, bounds, num_samples=num_samples, **shape)
        assert twin.tolist() == megatron.tolist()


@pytest.mark.parametrize("build", [build_map, build_megatron_map])
def test_samples_are_whole_documents_in_pieces(build: Any) -> None:
    lengths, bounds = corpus(200)
    rows = build(lengths, bounds, max_tokens=100, short_share=0.1, min_sentences=2, seed=3)
    rows = rows[np.argsort(rows[:, 0])].astype(np.int64)
    taken = np.concatenate([np.arange(first, end) for first, end, _ in rows])
    expected = [np.arange(a, b) for a, b in pairwise(bounds) if b - a >= 2]
    assert taken.tolist() == np.concatenate(expected).tolist()  # every sentence once, but of too short documents
    document_of = np.searchsorted(bounds, np.arange(bounds[-1]), side="right")
    for first, end, target in rows.tolist():
        assert document_of[first] == document_of[end - 1]
        assert end - first >= 2
        last_of_document = end == bounds[document_of[first]]
        # one sentence less is below the target, unless that one had to come along
        assert lengths[first : end - 1].sum() < target or last_of_document or end - first == 2
        assert lengths[first:end].sum() >= target or last_of_document


def test_short_targets_have_their_share() -> None:
    lengths, bounds = corpus(3000)
    targets = build_map(lengths, bounds, max_tokens=100, short_share=0.1, min_sentences=2, seed=5)[:, 2]
    short = targets[targets < 100].astype(int)
    assert 0.08 < len(short) / len(targets) < 0.12
    assert short.min() >= 2
    assert 40 < short.mean() < 60
    everything = build_map(lengths, bounds, max_tokens=100, short_share=0.0, min_sentences=2, seed=5)
    assert (everything[:, 2] == 100).all()


def test_the_samples_of_a_document_depend_on_that_document_only() -> None:
    lengths, bounds = corpus(50)
    shape: dict[str, Any] = {"max_tokens": 60, "short_share": 0.3, "min_sentences": 2, "seed": 9}
    rows = build_map(lengths, bounds, **shape)
    part = build_map(lengths, bounds[20:31], **shape)
    inside = (rows[:, 0] >= bounds[20]) & (rows[:, 1] <= bounds[30])
    assert part.tolist() == rows[inside].tolist()
    assert rows.tolist() != build_map(lengths, bounds, **(shape | {"seed": 10})).tolist()


@pytest.mark.usefixtures("_either")
@pytest.mark.parametrize("bounds", [[-1, 3], [0, 10], [3, 0]])
def test_bounds_outside_the_sentences_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="bounds must rise and lie within"):
        build_map(LENGTHS, np.array(bounds), **SHAPE)


def test_unaligned_arrays_are_read_as_they_are() -> None:
    """The arrays of an .idx file begin wherever the one before ends."""
    data = np.frombuffer(b"xx" + LENGTHS.tobytes(), np.uint8)[2:].view(np.int32)
    assert not data.flags.aligned
    assert build_map(data, BOUNDS, **SHAPE).tolist() == build_map(LENGTHS, BOUNDS, **SHAPE).tolist()
