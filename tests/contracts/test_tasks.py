"""Every evaluation task, a plugin's among them: whatever else a task measures, what every result needs is there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lmtrain.config.settings_base import add_plugin, plugins
from lmtrain.eval.evaluate_during_training import PlannedEvaluation
from lmtrain.eval.task import Answers, Facts, Prepared, all_tasks, find_task, sum_columns
from lmtrain.eval.windows import Request
from tests.contracts.plugin import PLUGIN

FACTS = Facts(
    protocol="", text_sha256="0", num_documents=2, num_words=9, words_rule="", num_bytes=40, bytes_rule="",
    num_tokens=12, prefix="", stride=4, denominator="",
)  # fmt: skip


def names() -> list[str]:
    add_plugin(PLUGIN)
    try:
        return list(all_tasks())
    finally:
        del plugins[PLUGIN]


def test_the_plugins_is_among_them() -> None:
    assert "lines" in all_tasks()


@pytest.mark.parametrize("name", names())
def test_measures_have_explicit_names_and_texts_their_bits_per_byte(name: str) -> None:
    task = find_task(name)
    known = {"words": np.array([4.0, 5.0]), "bytes": np.array([30.0, 10.0])}
    known |= {"answer": np.zeros(2), "chance": np.full(2, 0.5)}
    requests = [Request(np.zeros(6, np.int64), 5, 0), Request(np.zeros(8, np.int64), 7, 1)]
    prepared = Prepared(requests=requests, num_targets=12, facts=FACTS, text_columns=known)
    columns = task.columns(prepared, Answers(np.arange(2), np.array([20.0, 30.0]), np.array([5, 7]), np.array([3, 0])))
    measures = task.measures(sum_columns(columns))
    assert {"nll", "targets"} <= set(columns)
    assert task.headline in measures
    assert PlannedEvaluation(name=name, task=task, data="", prepared=prepared).measures == list(measures)
    assert "perplexity" not in measures
    of_text = task.causal and not name.startswith("choice/")  # whose every token is scored
    assert measures.get("bits_per_byte") == (pytest.approx(50 / math.log(2) / 40) if of_text else None)
    assert task.id == name
    assert task.data
    assert task.version
    assert task.recipe
