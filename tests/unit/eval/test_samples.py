"""Rows of an evaluation: each says its item in words, adds up to the result, and is read back to the last bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.errors import DataError
from lmtrain.eval.print_evaluation_results import encode_rows, read_columns, sample_rows
from lmtrain.eval.run_task import Outcome, run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import find_task
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

TEXTS = ["the mill 's wheel stood still", "cold in winter by the river", "the boy sold flour"]


@pytest.fixture
def outcome(tmp_path: Path, tokenizer: Tokenizer, build_gpt: Callable[..., Any]) -> Outcome:
    (tmp_path / "l.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    size = tokenizer.vocab_size
    subject = Subject(model=build_gpt(size), tokenizer=tokenizer, seq_len=16, vocab_size=size, dtype="fp32")
    return run(find_task("lambada/megatron-strict"), subject, tmp_path / "l.jsonl")


def rows_of(outcome: Outcome, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    return list(sample_rows(4, outcome.result, outcome.prepared, outcome.columns, tokenizer))


def test_a_row_for_every_item_with_its_words_and_numbers(outcome: Outcome, tokenizer: Tokenizer) -> None:
    rows = rows_of(outcome, tokenizer)
    assert [row["item"] for row in rows] == [0, 1, 2]
    assert [row["target"] for row in rows] == [" still", " river", " flour"]
    assert rows[2]["text"] == TEXTS[2]
    assert {(row["result"], row["task"]) for row in rows} == {(4, "lambada/megatron-strict")}
    assert sum(row["nll"] for row in rows) == pytest.approx(outcome.result.nll_sum_nats)
    assert np.mean([row["right"] for row in rows]) == outcome.result.measures["whole_word_accuracy"]


def test_what_is_read_back_is_what_was_written(outcome: Outcome, tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = encode_rows(iter(rows_of(outcome, tokenizer)))
    (tmp_path / "s.jsonl").write_bytes(data)
    found = read_columns(tmp_path / "s.jsonl", hashlib.sha256(data).hexdigest())
    assert found.keys() == {4}
    assert {name: values.tolist() for name, values in found[4].items()} == {
        name: values.tolist() for name, values in outcome.columns.items()
    }
    (tmp_path / "s.jsonl").write_bytes(data[:-2] + b"0}\n")
    with pytest.raises(DataError, match="was changed after it was written"):
        read_columns(tmp_path / "s.jsonl", hashlib.sha256(data).hexdigest())
