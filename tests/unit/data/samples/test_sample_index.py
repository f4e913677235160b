"""Samples cover every token, share one with their neighbour, and equal a slow twin that walks document by document."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.data.samples.causal_language_samples import SampleIndex
from tests.unit.data.writing import map_of

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def slow_spans(lengths: list[int], documents: range, seq_len: int) -> list[list[tuple[int, int, int]]]:
    """The tokens one by one, then runs of one document joined."""
    tokens = [(document, at) for document in documents for at in range(lengths[document])]
    samples = []
    for first in range(0, len(tokens) - seq_len, seq_len):
        spans: list[tuple[int, int, int]] = []
        for document, at in tokens[first : first + seq_len + 1]:
            if spans and spans[-1][0] == document:
                spans[-1] = (document, spans[-1][1], at + 1)
            else:
                spans.append((document, at, at + 1))
        samples.append(spans)
    return samples


@given(lengths=LENGTHS, seq_len=st.integers(1, 8), data=st.data())
def test_equals_the_slow_twin(lengths: list[int], seq_len: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(lengths)))
    documents = range(first, data.draw(st.integers(first, len(lengths))))
    index = SampleIndex(map_of(np.array(lengths, np.int32)), documents, seq_len)
    assert [index.document_spans(i) for i in range(index.num_samples)] == slow_spans(lengths, documents, seq_len)


@given(lengths=LENGTHS, seq_len=st.integers(1, 8))
def test_every_token_is_a_label_once(lengths: list[int], seq_len: int) -> None:
    index = SampleIndex(map_of(np.array(lengths)), range(len(lengths)), seq_len)
    labels = [token for i in range(index.num_samples) for token in _tokens(index, i)[1:]]
    everything = [(document, at) for document, length in enumerate(lengths) for at in range(length)]
    assert labels == everything[1 : 1 + index.num_samples * seq_len]
    assert len(everything) - 1 - len(labels) < seq_len or not everything
    for i in range(1, index.num_samples):
        assert _tokens(index, i)[0] == _tokens(index, i - 1)[-1]


def _tokens(index: SampleIndex, sample: int) -> list[tuple[int, int]]:
    return [(document, at) for document, start, stop in index.document_spans(sample) for at in range(start, stop)]


@given(lengths=LENGTHS, seq_len=st.integers(1, 8))
def test_crossings_are_counted(lengths: list[int], seq_len: int) -> None:
    index = SampleIndex(map_of(np.array(lengths)), range(len(lengths)), seq_len)
    ids = np.arange(index.num_samples)
    counts = np.bincount(index.document_starts(ids)[0], minlength=len(ids))
    assert counts.tolist() == [len(index.document_spans(i)) - 1 for i in ids.tolist()]


def test_known_samples() -> None:
    # Documents 3, 0, 4, 2, 1 of lengths 5, 3, 8, 2, 7 in this order: the boundaries known from Megatron-LM.
    index = SampleIndex(map_of(np.array([2, 5, 7, 8, 3])), range(5), 4)
    bounds = [index.document_spans(i)[0][:2] for i in range(index.num_samples)]
    assert bounds == [(0, 0), (1, 2), (2, 1), (2, 5), (3, 2), (3, 6)]
    assert index.document_spans(5)[-1] == (4, 0, 3)


def test_samples_beyond_32_bits_are_right() -> None:
    index = SampleIndex(map_of(np.full(5000, 2**31 - 1, np.int32)), range(5000), 1024)
    assert index.num_tokens == 5000 * (2**31 - 1)
    last = index.num_samples - 1
    first = last * 1024 - 4999 * (2**31 - 1)
    assert index.document_spans(last) == [(4999, first, first + 1025)]
    assert [len(found) for found in index.document_starts(np.array([last]))] == [0, 0]
