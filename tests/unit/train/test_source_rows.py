"""Loss, tokens and epochs by source, summed over the steps since the last row."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from lmtrain.batch import SourceCounts, StepBatches
from lmtrain.data.training_data_by_source import MAX_SHOWN, TrainingPart
from lmtrain.train.run_objects_and_resume import Progress
from lmtrain.train.step import StepResult


def parts_of(num_sources: int) -> Sequence[TrainingPart]:
    parts = [
        SimpleNamespace(name=f"s{i}", key=f"key{i}", share=Fraction(num_sources - i), num_tokens=100)
        for i in range(num_sources)
    ]
    return cast(Sequence[TrainingPart], parts)


def step_of(losses: list[float], *by_source: tuple[int, list[int], int, int]) -> tuple[StepBatches, StepResult]:
    counts = tuple(SourceCounts(d, np.array(rows), labels, tokens) for d, rows, labels, tokens in by_source)
    tokens = sum(part.tokens for part in counts) or 32
    batches = StepBatches(0, [], len(losses), (1,), np.arange(len(losses)), tokens, counts)
    return batches, StepResult(0.0, 0.0, False, sample_losses=losses)


def test_sums_run_over_the_steps_since_the_last_row() -> None:
    progress, parts = Progress(), parts_of(2)
    progress.count(*step_of([1.0, 10.0, 3.0, 20.0], (0, [0, 2], 4, 16), (1, [1, 3], 5, 8)), parts)
    progress.count(*step_of([7.0, 5.0, 0.0, 0.0], (0, [0, 1], 4, 16)), parts)
    assert progress.take_source_values(parts)["sources"] == {
        "s0": {"loss": 16 / 8, "labels": 8, "tokens": 32, "epochs": 0.32},
        "s1": {"loss": 30 / 5, "labels": 5, "tokens": 8, "epochs": 0.08},
    }
    progress.count(*step_of([3.0], (1, [0], 2, 8)), parts)
    row = progress.take_source_values(parts)["sources"]
    assert row["s0"] == {"labels": 0, "tokens": 32, "epochs": 0.32}, "no sample, no loss"
    assert row["s1"]["loss"] == 1.5
    assert progress.source_tokens == {"key0": 32, "key1": 16}


def test_the_rest_of_many_is_one() -> None:
    progress, parts = Progress(), parts_of(1000)
    last = [(d, [d], 2, 8) for d in range(1000)]
    progress.count(*step_of([float(d) for d in range(1000)], *last), parts)
    row = progress.take_source_values(parts)["sources"]
    assert list(row) == [*(f"s{i}" for i in range(MAX_SHOWN)), "rest"]
    assert row["rest"]["sources"] == 1000 - MAX_SHOWN
    assert row["rest"]["tokens"] == 8 * (1000 - MAX_SHOWN)
    assert row["rest"]["epochs"] == pytest.approx(0.08)
    assert row["rest"]["loss"] == pytest.approx(sum(range(MAX_SHOWN, 1000)) / (2 * (1000 - MAX_SHOWN)))


def test_a_single_dataset_has_tokens_but_no_values() -> None:
    progress, parts = Progress(), parts_of(1)
    progress.count(*step_of([]), parts)
    assert progress.source_tokens == {"key0": 32}
    assert progress.take_source_values(parts) == {}
