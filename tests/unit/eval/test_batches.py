"""Batches of requests: each once, little padding, no more tokens than allowed; laid out so that none sees another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.batch import IGNORED, Batch
from lmtrain.eval.score_targets import MAX_PADDING, Scorer, _checksum, batch_indices, collate
from lmtrain.eval.windows import MaskedRequest, Request
from lmtrain.models.gpt import build
from tests.layouts.family_models import FAMILY_MODELS
from tests.marks import wide
from tests.unit.eval.conftest import PlainModel
from tests.unit.models.first_weights import start


def requests_of(lengths: list[int], scored: list[int] | None = None) -> list[Request]:
    """Of tokens fed; every token of all of them is another."""
    made, first = [], 0
    for index, length in enumerate(lengths):
        made.append(Request(np.arange(first, first + length + 1), scored[index] if scored else 1, index))
        first += length + 1
    return made


def test_the_checksum_by_which_ranks_compare_texts_is_of_all_that_decides_a_batch() -> None:
    """Change one field of the last request after the other, the order of requests, and their number."""
    plain = requests_of([3, 5, 4], [1, 2, 2])
    masked = MaskedRequest(np.arange(6), 2, 3, places=np.array([0, 2]), segments=np.array([0, 0, 1, 1]))
    changes: list[dict[str, Any]] = [{"tokens": np.arange(1, 7)}, {"num_scored": 1}, {"tokens": np.arange(7)}]
    changes += [{"places": np.array([0, 3])}, {"segments": np.array([0, 1, 1, 1])}, {"places": None}]
    changes += [{"segments": None}]
    rows = [[*plain, masked], [masked, *plain], plain, plain[:2], [*plain, plain[0]], plain[::-1]]
    rows += [[*plain, replace(masked, **change)] for change in changes]
    rows += [[*plain[:2], replace(plain[2], **change)] for change in changes[:3]]
    assert len({_checksum(requests) for requests in rows}) == len(rows)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60) | st.just(60), min_size=1, max_size=80),
    batch_size=st.integers(1, 9),
    packs=st.booleans(),
    data=st.data(),
)
def test_each_request_is_fed_once_with_little_padding(
    lengths: list[int], batch_size: int, packs: bool, data: st.DataObject
) -> None:
    scored = [data.draw(st.integers(1, length)) for length in lengths]
    requests = requests_of(lengths, scored)
    found = list(batch_indices(requests, batch_size, packs=packs))
    assert sorted(one for batch in found for one in batch) == list(range(len(requests)))
    for group in found:
        batch = collate([requests[one] for one in group], packs=packs)
        assert packs or (batch.documents_BT is None and len(batch.tokens_BT) == len(group))
        num_real = sum(lengths[one] for one in group)
        assert batch.tokens_BT.size <= batch_size * max(lengths)
        assert batch.tokens_BT.size - num_real <= MAX_PADDING * batch.tokens_BT.size
        # labels lie in the order of the requests, and each behind the token that it follows
        labels = [requests[one].tokens[-scored[one] :] for one in group]
        assert np.array_equal(batch.labels_BT[batch.labels_BT != IGNORED], np.concatenate(labels))
        assert np.array_equal(batch.labels_BT[batch.is_query_BT], batch.tokens_BT[batch.is_query_BT] + 1)


def test_equal_lengths_keep_their_order_and_are_not_packed() -> None:
    requests = requests_of([10] * 7)
    assert list(batch_indices(requests, 3, packs=True)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert collate(requests[:3], packs=True).documents_BT is None


def test_short_ones_fill_the_rows_of_long_ones() -> None:
    requests = requests_of([30, 20, 10, 29, 12, 18])
    (group,) = batch_indices(requests, 4, packs=True)
    batch = collate([requests[one] for one in group], packs=True)
    assert batch.tokens_BT.shape == (4, 30)
    assert batch.documents_BT.max() == 1
    for row in range(4):
        for document in set(batch.documents_BT[row]) - {-1}:
            here = batch.documents_BT[row] == document
            assert batch.positions_BT[row][here].tolist() == list(range(here.sum()))
            assert (np.diff(batch.tokens_BT[row][here]) == 1).all(), "one request, from its beginning"


def test_short_requests_share_a_batch_of_as_many_tokens() -> None:
    first, *others = batch_indices(requests_of([100] + [10] * 40), 2, packs=True)
    assert first == list(range(11)), "one row of a hundred, one of ten tens"
    assert [len(group) for group in others] == [20, 10]


@pytest.mark.parametrize("batch_size", [3, *wide(1, 7, 64)])
@pytest.mark.parametrize("packs", [False, True])
def test_requests_together_score_as_each_alone(build_gpt: Callable[..., Any], batch_size: int, packs: bool) -> None:
    """A model that does not keep documents apart is fed one request a row."""
    model, random = build_gpt(), np.random.default_rng(0)
    model.separates_documents = packs
    fed: list[Batch] = []
    model.model.register_forward_pre_hook(lambda _, given: fed.append(given[0]))
    lengths = random.integers(1, 17, 50)
    requests = [Request(random.integers(0, 37, n + 1), int(random.integers(1, n + 1)), 0) for n in lengths]
    scorer = Scorer(model, batch_size=batch_size)
    together = list(scorer.score(requests))
    assert any(batch.documents_BT is not None for batch in fed) == packs
    num_fed = sum(batch.tokens_BT.numel() for batch in fed)
    assert scorer.num_padding == num_fed - lengths.sum() <= MAX_PADDING * num_fed
    alone = [next(Scorer(model, batch_size=1).score([request])) for request in requests]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.nll, other.nll, rtol=1e-6, atol=2e-6)
        assert np.array_equal(one.greedy, other.greedy)


@pytest.mark.parametrize("name", FAMILY_MODELS)
@pytest.mark.parametrize("packs", [False, True])
def test_no_words_of_a_model_let_a_text_see_its_neighbours(name: str, packs: bool) -> None:
    """Texts are shorter and longer than every original length and window, and as long."""
    model, random = build(replace(FAMILY_MODELS[name], init_std=0.4)), np.random.default_rng(0)
    start(model, 1)
    plain = PlainModel(model)
    plain.separates_documents = packs
    lengths = [*range(1, 24), *range(1, 13)]
    requests = [Request(random.integers(0, 67, n + 1), n, 0) for n in lengths]
    alone = [next(Scorer(plain, batch_size=1).score([request])) for request in requests]
    for batch_size in (2, 5, 40):
        together = list(Scorer(plain, batch_size=batch_size).score(requests))
        for one, other in zip(together, alone, strict=True):
            np.testing.assert_allclose(one.nll, other.nll, rtol=1e-5, atol=2e-5)
