"""One run of one task: progress, the engine's sums, and a tokenizer that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.errors import DataError
from lmtrain.eval.runner import Subject, gather, run
from lmtrain.eval.scoring import Scored
from lmtrain.eval.task import find_task, item_columns
from lmtrain.eval.windows import Request
from lmtrain.tokenizer.base import Tokenizer
from tests.unit.eval.conftest import given_texts


def test_sums_are_kept_by_item() -> None:
    requests = [Request(np.arange(3), 2, item) for item in (0, 2, 2)]
    scored = [
        Scored(np.array([1.0, 2.0]), np.array([True, True])),
        Scored(np.array([0.5, 0.25]), np.array([True, True])),
        Scored(np.array([4.0, 8.0]), np.array([True, False])),
    ]
    columns = item_columns({"bytes": np.array([7.0, 1.0, 2.0])}, gather(requests, scored))
    assert {name: values.tolist() for name, values in columns.items()} == {
        "bytes": [7, 1, 2], "nll": [3, 0, 12.75], "targets": [2, 0, 4], "greedy": [2, 0, 3],
        "items": [1, 0, 1], "items_greedy": [1, 0, 0],
    }  # fmt: skip


def test_progress_ends_at_the_number_of_targets(
    tmp_path: Path, tokenizer: Tokenizer, build_gpt: Callable[..., Any], text: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    subject = Subject(
        model=build_gpt(tokenizer.vocab_size), tokenizer=tokenizer, seq_len=16, vocab_size=tokenizer.vocab_size,
        dtype="fp32",
    )  # fmt: skip
    seen: list[tuple[int, int]] = []
    result = run(
        find_task("perplexity"), subject, given_texts(tmp_path / "a.txt"),
        progress=lambda done, total: seen.append((done, total)),
    ).result  # fmt: skip
    assert seen[-1] == (result.num_targets, result.num_targets)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_tokenizer_larger_than_the_model_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, build_gpt: Callable[..., Any]
) -> None:
    (tmp_path / "a.txt").write_text("mill")
    subject = Subject(model=build_gpt(37), tokenizer=tokenizer, seq_len=16, vocab_size=37, dtype="fp32")
    with pytest.raises(DataError, match="and the model 37"):
        run(find_task("perplexity"), subject, given_texts(tmp_path / "a.txt"))
