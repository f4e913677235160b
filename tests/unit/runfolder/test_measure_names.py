"""Names of what a run measures, and what a step is worth by one of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lmtrain.runfolder.tensorboard_metric_names import (
    larger_is_better,
    row_measures,
    score_by_step,
    validation_measure_names,
)

VALID: dict[str, Any] = {"event": "valid", "step": 4, "loss": 3.5, "ppl": 33.1, "accuracy": 0.25, "tokens": 64}


def test_names_are_those_of_tensorboard() -> None:
    assert row_measures(VALID) == {"loss/valid": 3.5, "valid/ppl": 33.1, "valid/accuracy": 0.25}
    bert = VALID | {"loss/mlm": 3.0, "loss/pair": 0.5, "accuracy/pair": 0.75}
    assert row_measures(bert).keys() - row_measures(VALID).keys() == {
        "valid/loss/mlm", "valid/loss/pair", "valid/accuracy/pair"
    }  # fmt: skip
    domain = {"loss": 2.0, "ppl": 7.4, "accuracy": 0.5, "tokens": 8}
    found = row_measures(VALID | {"domains": {"wiki": domain}})
    assert found == row_measures(VALID) | {"loss/valid/wiki": 2.0, "valid/wiki/ppl": 7.4, "valid/wiki/accuracy": 0.5}
    row = {"event": "eval", "step": 4, "name": "lambada/x", "measures": {"whole_word_accuracy": 0.1}}
    assert row_measures(row) == {"eval/lambada/x/whole_word_accuracy": 0.1}
    assert row_measures({"event": "step", "loss": 1.0}) == {}


def test_the_average_of_the_weights_has_names_of_its_own() -> None:
    average = {"loss": 2.5, "ppl": 12.2, "accuracy": 0.5, "domains": {"ema": {"loss": 2.0}}}
    found = row_measures(VALID | {"ema": average})
    assert found == row_measures(VALID) | {
        "loss/ema": 2.5, "ema/ppl": 12.2, "ema/accuracy": 0.5, "loss/ema/ema": 2.0
    }  # fmt: skip
    row = {"event": "eval", "step": 4, "name": "lambada/x", "measures": {"accuracy": 0.1}, "ema": {"accuracy": 0.2}}
    assert row_measures(row) == {"eval/lambada/x/accuracy": 0.1, "eval/lambada/x/ema/accuracy": 0.2}


@pytest.mark.parametrize("terms", [("lm",), ("mlm",), ("mlm", "pair")])
def test_names_are_known_before_anything_is_measured(terms: tuple[str, ...]) -> None:
    values = {"loss/mlm": 3.0, "loss/pair": 0.5, "accuracy/pair": 0.75} if len(terms) > 1 else {}
    row = VALID | values | {"domains": {"wiki": VALID | values}}
    assert set(validation_measure_names(terms, ["wiki"])) == row_measures(row).keys()
    of_both = row_measures(row | {"ema": row}).keys()
    assert set(validation_measure_names(terms, ["wiki"], of_average=True)) == of_both - row_measures(row).keys()


@pytest.mark.parametrize(
    ("name", "larger"),
    [("loss/valid", False), ("valid/ppl", False), ("valid/accuracy", True), ("valid/accuracy/pair", True),
     ("valid/wiki/accuracy", True), ("loss/valid/my_accuracy", False), ("valid/my_accuracy/ppl", False),
     ("eval/lambada/x/whole_word_accuracy", True), ("eval/accuracy/bits_per_byte", False),
     ("ema/accuracy", True), ("loss/ema", False), ("eval/x/ema/accuracy", True)],
)  # fmt: skip
def test_of_accuracies_alone_more_is_better(name: str, larger: bool) -> None:
    assert larger_is_better(name) is larger


def test_worth_is_more_where_a_measure_is_better() -> None:
    rows = [
        VALID | {"step": step, "loss": loss, "accuracy": loss / 10} for step, loss in ((1, 3.0), (2, 2.0), (3, 4.0))
    ]
    by_loss, by_accuracy = (score_by_step(rows, name) for name in ("loss/valid", "valid/accuracy"))
    assert max(by_loss, key=by_loss.__getitem__) == 2
    assert max(by_accuracy, key=by_accuracy.__getitem__) == 3


@pytest.mark.parametrize("value", [math.nan, None, "3", [1], True])
def test_what_is_no_number_is_worth_nothing(value: Any) -> None:
    rows = [VALID, VALID | {"step": 6, "loss": value}]
    assert score_by_step(rows, "loss/valid") == {4: -3.5}
    damaged: list[dict[str, Any]] = [
        {"event": "eval", "step": 6, "measures": value},
        {"event": "valid", "domains": value},
        {"event": "valid", "ema": value},
        {"event": "eval", "step": 6, "ema": value},
    ]
    assert [row_measures(row) for row in damaged] == [{}, {}, {}, {}]
