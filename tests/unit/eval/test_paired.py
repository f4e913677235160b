"""Two models on the same items: pairs are surer than either number, and only the same question is compared."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from lmtrain.errors import DataError
from lmtrain.eval.statistics import Side, compare, intervals
from lmtrain.eval.task import Columns, Result, find_task
from tests.unit.eval.test_report import RESULT

TASK = find_task("perplexity")
NUM_ITEMS = 300


def columns(gain: float, seed: int) -> Columns:
    """Items of very different difficulty, the same for both models, and a little noise of the model's own."""
    hard = np.random.default_rng(1).gamma(2.0, 40.0, NUM_ITEMS)
    own = np.random.default_rng(seed).normal(0.0, 1.0, NUM_ITEMS)
    targets = np.full(NUM_ITEMS, 20.0)
    return {
        "nll": hard + own - gain, "targets": targets, "greedy": targets / 4, "bytes": 4 * targets, "words": targets / 2,
        "items": np.ones(NUM_ITEMS), "items_greedy": np.zeros(NUM_ITEMS),
    }  # fmt: skip


def side(name: str, gain: float, seed: int, **changed: object) -> Side:
    result: Result = dataclasses.replace(RESULT, task="perplexity", num_items=NUM_ITEMS, **changed)  # type: ignore[arg-type]
    return Side(name, result, columns(gain, seed))


def test_a_difference_of_pairs_is_as_sure_as_theory_says_though_the_numbers_overlap() -> None:
    a, b = side("a", 0.0, 2), side("b", 0.5, 3)
    difference = compare(TASK, a, b).differences["nll_per_token_nats"]
    assert difference.difference == pytest.approx((b.columns["nll"] - a.columns["nll"]).sum() / (20 * NUM_ITEMS))
    assert difference.interval is not None
    low, high = difference.interval
    error = 1.96 * (b.columns["nll"] - a.columns["nll"]).std() / math.sqrt(NUM_ITEMS) / 20
    assert high - low == pytest.approx(2 * error, rel=0.15)
    assert difference.beyond_chance
    of_a, of_b = (intervals(one.columns, TASK.measures)["nll_per_token_nats"] for one in (a, b))
    assert of_a[0] < of_b[1]  # alone, neither number would say so
    assert of_b[0] < of_a[1]


def test_equal_models_differ_by_chance_only() -> None:
    found = compare(TASK, side("a", 0.0, 2), side("b", 0.0, 3)).differences["bits_per_byte"]
    assert not found.beyond_chance
    same = compare(TASK, side("a", 0.0, 2), side("b", 0.0, 2)).differences["bits_per_byte"]
    assert (same.difference, same.interval) == (0.0, (0.0, 0.0))


def test_measures_by_token_are_left_out_where_the_tokenizers_differ() -> None:
    found = compare(TASK, side("a", 0.0, 2), side("b", 0.5, 3, tokenizer_fingerprint="other"))
    assert set(found.differences) == {"bits_per_byte", "word_perplexity"}
    assert "token_perplexity" in found.left_out
    assert found.to_dict()["differences"]["bits_per_byte"]["beyond_chance"] is True


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"protocol": "perplexity-s64"}, "protocol perplexity and perplexity-s64"),
        ({"text_sha256": "00"}, "text_sha256 abab"),
        ({"limit": 5}, "limit None and 5"),
        ({"stride": 1}, "stride 64 and 1"),
    ],
)
def test_another_question_is_refused_with_what_differs(changed: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        compare(TASK, side("a", 0.0, 2), side("b", 0.0, 3, **changed))


def test_other_items_under_the_same_facts_are_refused() -> None:
    b = side("b", 0.0, 3)
    b.columns["bytes"][7] += 1
    with pytest.raises(DataError, match="bytes of the items"):
        compare(TASK, side("a", 0.0, 2), b)


def test_one_item_has_no_interval() -> None:
    one = {name: values[:1] for name, values in columns(0.0, 2).items()}
    a, b = (Side(name, dataclasses.replace(RESULT, task="perplexity", num_items=1), one) for name in "ab")
    found = compare(TASK, a, b).differences["bits_per_byte"]
    assert found.interval is None
    assert not found.beyond_chance
