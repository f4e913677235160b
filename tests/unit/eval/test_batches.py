"""Batches of requests: each once, little padding, no more than was allowed; laid out so that none sees another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.batch import IGNORED
from lmtrain.eval.batches import MOST_PADDING, batches, collate
from lmtrain.eval.scoring import Scorer
from lmtrain.eval.windows import Request


def requests_of(lengths: list[int], scored: list[int] | None = None) -> list[Request]:
    """Of tokens fed; every token of all of them is another."""
    made, first = [], 0
    for index, length in enumerate(lengths):
        made.append(Request(np.arange(first, first + length + 1), scored[index] if scored else 1, index))
        first += length + 1
    return made


@given(
    lengths=st.lists(st.integers(1, 60) | st.just(60), min_size=1, max_size=80),
    batch_size=st.integers(1, 9),
    data=st.data(),
)
def test_each_request_is_fed_once_with_little_padding(lengths: list[int], batch_size: int, data: st.DataObject) -> None:
    scored = [data.draw(st.integers(1, length)) for length in lengths]
    requests, max_kept = requests_of(lengths, scored), data.draw(st.integers(1, 200))
    found = list(batches(requests, batch_size, max_kept))
    assert sorted(one for batch in found for one in batch) == list(range(len(requests)))
    for group in found:
        batch = collate([requests[one] for one in group])
        num_real = sum(lengths[one] for one in group)
        assert batch.tokens_BT.size <= batch_size * max(lengths)
        assert batch.tokens_BT.size - num_real <= MOST_PADDING * batch.tokens_BT.size
        assert len(group) == 1 or sum(scored[one] for one in group) <= max_kept
        # labels lie in the order of the requests, and each behind the token that it follows
        labels = [requests[one].tokens[-scored[one] :] for one in group]
        assert np.array_equal(batch.labels_BT[batch.labels_BT != IGNORED], np.concatenate(labels))
        assert np.array_equal(batch.labels_BT[batch.asked_BT], batch.tokens_BT[batch.asked_BT] + 1)


def test_equal_lengths_keep_their_order_and_are_not_packed() -> None:
    requests = requests_of([10] * 7)
    assert list(batches(requests, 3, 100)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert collate(requests[:3]).documents_BT is None


def test_short_ones_fill_the_rows_of_long_ones() -> None:
    requests = requests_of([30, 20, 10, 29, 12, 18])
    (group,) = batches(requests, 4, 100)
    batch = collate([requests[one] for one in group])
    assert batch.tokens_BT.shape == (4, 30)
    assert batch.documents_BT.max() == 1
    for row in range(4):
        for document in set(batch.documents_BT[row]) - {-1}:
            here = batch.documents_BT[row] == document
            assert batch.positions_BT[row][here].tolist() == list(range(here.sum()))
            assert (np.diff(batch.tokens_BT[row][here]) == 1).all(), "one request, from its beginning"


def test_short_requests_share_a_batch_of_as_many_tokens() -> None:
    first, *others = batches(requests_of([100] + [10] * 40), 2, 1000)
    assert first == list(range(11)), "one row of a hundred, one of ten tens"
    assert [len(group) for group in others] == [20, 10]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_packed_rows_score_as_each_request_alone(build_gpt: Callable[..., Any], batch_size: int) -> None:
    model, random = build_gpt(), np.random.default_rng(0)
    lengths = random.integers(1, 17, 50)
    requests = [Request(random.integers(0, 37, n + 1), int(random.integers(1, n + 1)), 0) for n in lengths]
    assert any(collate([requests[one] for one in group]).documents_BT is not None for group in batches(requests, 7, 99))
    together = list(Scorer(model, batch_size=batch_size).score(requests))
    alone = [next(Scorer(model, batch_size=1).score([request])) for request in requests]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.nll, other.nll, rtol=1e-6, atol=2e-6)
        assert np.array_equal(one.greedy, other.greedy)
