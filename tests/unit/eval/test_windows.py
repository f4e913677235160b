"""Each target is scored exactly once, in Megatron's windows as in any others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.errors import UsageError
from lmtrain.eval.windows import StreamRequests, Window, WindowedRequests, windows

SIZES = st.tuples(st.integers(1, 24), st.data())


def megatron(num_tokens: int, seq_len: int, stride: int) -> list[tuple[int, list[int]]]:
    """A slow twin from the protocol's description: where each window starts, and the targets that it scores."""
    num_targets = num_tokens - 1
    count = max(math.ceil(max(num_targets - stride, 0) / stride) + 1, 1)
    found = []
    for index in range(count):
        start = index * stride
        slots = range(seq_len) if index == 0 else range(seq_len - stride, seq_len)
        found.append((start, [start + slot + 1 for slot in slots if start + slot + 1 <= num_targets]))
    return found


@given(SIZES)
def test_each_target_is_scored_exactly_once(sizes: tuple[int, st.DataObject]) -> None:
    seq_len, data = sizes
    stride = data.draw(st.integers(1, seq_len))
    num_tokens = data.draw(st.integers(0, 3 * seq_len + 1))
    scored = [t for w in windows(num_tokens, seq_len, stride) for t in range(w.first_scored, w.stop + 1)]
    assert scored == list(range(1, num_tokens))


@given(SIZES)
def test_a_last_window_that_looks_back_scores_the_same_targets(sizes: tuple[int, st.DataObject]) -> None:
    seq_len, data = sizes
    stride = data.draw(st.integers(1, seq_len))
    num_tokens = data.draw(st.integers(0, 3 * seq_len + 1))
    plain = list(windows(num_tokens, seq_len, stride))
    back = list(windows(num_tokens, seq_len, stride, last_looks_back=True))
    assert [(w.stop, w.first_scored) for w in back] == [(w.stop, w.first_scored) for w in plain]
    assert back[:-1] == plain[:-1]
    assert [w.start for w in back[-1:]] == [max(w.stop - seq_len, 0) for w in plain[-1:]]


@given(SIZES)
def test_a_stream_of_items_scores_each_target_once_for_its_item(sizes: tuple[int, st.DataObject]) -> None:
    seq_len, data = sizes
    stride = data.draw(st.integers(1, seq_len))
    num_tokens = data.draw(st.integers(0, 3 * seq_len + 1))
    items = np.sort(data.draw(st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens)))
    cut = list(windows(num_tokens, seq_len, stride))
    requests = list(StreamRequests(np.arange(num_tokens), items, cut))
    scored = [(int(token), r.item) for r in requests for token in r.tokens[-r.num_scored :]]
    assert scored == [(token, items[token]) for token in range(1, num_tokens)]
    starts = {token: w.start for w in cut for token in range(w.first_scored, w.stop + 1)}
    assert all(starts[int(token)] == r.tokens[0] for r in requests for token in r.tokens[-r.num_scored :])


@given(SIZES)
def test_no_window_is_longer_than_the_model_sees_or_scores_nothing(sizes: tuple[int, st.DataObject]) -> None:
    seq_len, data = sizes
    stride = data.draw(st.integers(1, seq_len))
    num_tokens = data.draw(st.integers(0, 3 * seq_len + 1))
    for window in windows(num_tokens, seq_len, stride):
        assert 1 <= window.stop - window.start <= seq_len
        assert window.start < window.first_scored <= window.stop


@given(SIZES)
def test_windows_are_megatrons_less_those_that_are_all_padding(sizes: tuple[int, st.DataObject]) -> None:
    seq_len, data = sizes
    stride = data.draw(st.integers(1, seq_len))
    num_tokens = data.draw(st.integers(0, 3 * seq_len + 1))
    twin = [(start, targets) for start, targets in megatron(num_tokens, seq_len, stride) if targets]
    ours = [(w.start, list(range(w.first_scored, w.stop + 1))) for w in windows(num_tokens, seq_len, stride)]
    assert ours == twin


def test_the_published_size_has_padding_windows_that_cost_nothing_here() -> None:
    twin = megatron(270_330, 1024, 32)
    assert len(twin) == 8448
    assert len(list(windows(270_330, 1024, 32))) == sum(bool(targets) for _, targets in twin) == 8417


def test_a_small_case_by_hand() -> None:
    assert list(windows(9, 4, 2)) == [Window(0, 4, 1), Window(2, 6, 5), Window(4, 8, 7)]
    assert list(windows(6, 4, 4)) == [Window(0, 4, 1), Window(4, 5, 5)]


@pytest.mark.parametrize("stride", [0, 5])
def test_a_stride_that_skips_targets_is_refused(stride: int) -> None:
    with pytest.raises(UsageError, match=f"stride of {stride}"):
        list(windows(9, 4, stride))


def test_requests_carry_their_targets_and_may_be_walked_twice() -> None:
    requests = WindowedRequests([np.arange(9), np.arange(1), np.arange(3)], 4, 2)
    walked = [(r.tokens.tolist(), r.num_scored) for r in requests]
    assert walked == [([0, 1, 2, 3, 4], 4), ([2, 3, 4, 5, 6], 2), ([4, 5, 6, 7, 8], 2), ([0, 1, 2], 2)]
    assert [(r.tokens.tolist(), r.num_scored) for r in requests] == walked
