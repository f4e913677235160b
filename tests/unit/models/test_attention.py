"""Attention masks and products equal slow loops written from their definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.models.layers.attention import DotProduct, build_mask


def slow_mask(length: int, causal: bool, window: int | None, documents: list[int] | None) -> list[list[bool]]:
    return [
        [
            (not causal or seen <= at)
            and (window is None or abs(at - seen) < window)
            and (documents is None or documents[at] == documents[seen])
            for seen in range(length)
        ]
        for at in range(length)
    ]


def slow_attention(q: Tensor, k: Tensor, v: Tensor, allowed: list[list[bool]]) -> Tensor:
    num_samples, heads, length, width = q.shape
    group = heads // k.shape[1]
    result = torch.zeros_like(q)
    for sample in range(num_samples):
        for head in range(heads):
            for at in range(length):
                seen = [j for j in range(length) if allowed[at][j]]
                scores = [float(q[sample, head, at] @ k[sample, head // group, j]) / math.sqrt(width) for j in seen]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                for j, weight in zip(seen, weights, strict=True):
                    result[sample, head, at] += weight / sum(weights) * v[sample, head // group, j]
    return result


@settings(max_examples=60, deadline=None)
@given(data=st.data(), length=st.integers(1, 12), causal=st.booleans())
def test_mask_equals_the_definition(data: st.DataObject, length: int, causal: bool) -> None:
    window = data.draw(st.none() | st.integers(1, 14))
    documents = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=length, max_size=length).map(sorted))
    documents_BT = None if documents is None else torch.tensor([documents], dtype=torch.int32)
    mask = build_mask(length, causal=causal, window=window, documents_BT=documents_BT, device=torch.device("cpu"))
    expected = torch.tensor(slow_mask(length, causal, window, documents))
    if mask is None:
        assert torch.equal(expected, torch.tensor(slow_mask(length, causal, None, None)))
    else:
        assert torch.equal(mask if mask.ndim == 2 else mask[0, 0], expected)
        assert mask.diagonal(dim1=-2, dim2=-1).all(), "a token that sees nothing gives NaN"


@pytest.mark.parametrize("documents", [None, [0, 0, 1, 1]])
def test_nobody_who_sees_both_sides_sees_padding(documents: list[int] | None) -> None:
    not_padding_BT = torch.tensor([[True, True, True, False]])
    documents_BT = None if documents is None else torch.tensor([documents])
    options: dict[str, Any] = {"window": None, "documents_BT": documents_BT, "device": torch.device("cpu")}
    mask = build_mask(4, causal=False, not_padding_BT=not_padding_BT, **options)
    assert mask is not None
    expected = torch.tensor(slow_mask(4, False, None, documents)) & not_padding_BT
    assert torch.equal(mask.expand(1, 1, 4, 4)[0, 0], expected)
    alone = build_mask(4, causal=True, **options)
    # a causal token never looks to the right
    padded = build_mask(4, causal=True, not_padding_BT=not_padding_BT, **options)
    assert (alone is None and padded is None) or torch.equal(alone, padded)  # type: ignore[arg-type]


def test_no_mask_on_the_fast_path() -> None:
    device = torch.device("cpu")
    assert build_mask(8, causal=True, window=None, documents_BT=None, device=device) is None
    assert build_mask(8, causal=True, window=8, documents_BT=None, device=device) is None
    assert build_mask(8, causal=False, window=None, documents_BT=None, device=device) is None
    assert build_mask(8, causal=True, window=7, documents_BT=None, device=device) is not None


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [None, [0, 0, 0, 1, 1, 2, 2, 2, 2]])
def test_product_equals_a_loop(kv_heads: int, window: int | None, documents: list[int] | None) -> None:
    generator = torch.Generator().manual_seed(3)
    length = 9
    q = torch.randn(1, 4, length, 6, generator=generator)
    k, v = torch.randn(2, 1, kv_heads, length, 6, generator=generator)
    documents_BT = None if documents is None else torch.tensor([documents])
    mask = build_mask(length, causal=True, window=window, documents_BT=documents_BT, device=q.device)
    result = DotProduct(0.0, causal=True)(q, k, v, mask)
    expected = slow_attention(q, k, v, slow_mask(length, True, window, documents))
    assert (result - expected).abs().max() < 1e-5


def test_dropout_leaves_evaluation_alone() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    core = DotProduct(0.5, causal=True)
    assert not torch.equal(core(q, k, v, None), core(q, k, v, None))
    core.eval()
    assert torch.equal(core(q, k, v, None), DotProduct(0.0, causal=True)(q, k, v, None))
