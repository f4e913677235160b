"""One run of one task: progress, the engine's sums, and a tokenizer that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.errors import DataError, UsageError
from lmtrain.eval.load_model import check_vocabulary
from lmtrain.eval.run_task import PositionLosses, gather_answers, run
from lmtrain.eval.score_targets import Subject, TargetScores
from lmtrain.eval.task import find_task, item_columns
from lmtrain.eval.windows import Request
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.eval.conftest import given_texts


def test_sums_are_kept_by_item() -> None:
    requests = [Request(np.arange(3), 2, item) for item in (0, 2, 2)]
    scored = [
        TargetScores(np.array([1.0, 2.0]), np.array([True, True])),
        TargetScores(np.array([0.5, 0.25]), np.array([True, True])),
        TargetScores(np.array([4.0, 8.0]), np.array([True, False])),
    ]
    columns = item_columns({"bytes": np.array([7.0, 1.0, 2.0])}, gather_answers(requests, scored, PositionLosses()))
    assert {name: values.tolist() for name, values in columns.items()} == {
        "bytes": [7, 1, 2], "nll": [3, 0, 12.75], "targets": [2, 0, 4], "greedy": [2, 0, 3],
        "items": [1, 0, 1], "items_greedy": [1, 0, 0],
    }  # fmt: skip


@pytest.fixture
def subject(tokenizer: Tokenizer, build_gpt: Callable[..., Any]) -> Subject:
    return Subject(
        model=build_gpt(tokenizer.vocab_size), tokenizer=tokenizer, seq_len=16, vocab_size=tokenizer.vocab_size,
        dtype="fp32",
    )  # fmt: skip


@pytest.fixture
def lines(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in text.split(" \n ") if line.strip()))
    return path


def test_progress_goes_by_the_tokens_that_are_fed(subject: Subject, lines: Path) -> None:
    seen: list[tuple[int, int]] = []
    outcome = run(
        find_task("perplexity"), subject, given_texts(lines), stride=4,
        progress=lambda done, total, earlier=0: seen.append((done, total)),
    )  # fmt: skip
    fed = sum(len(request.tokens) - 1 for request in outcome.prepared.requests)
    assert fed > outcome.result.num_targets
    assert seen[0] == (0, fed)
    assert seen[-1] == (fed, fed)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_the_recipe_says_how_sure_the_number_is_and_how_it_came_about(subject: Subject, lines: Path) -> None:
    result = run(find_task("perplexity"), subject, given_texts(lines)).result
    for name in ("token_perplexity", "bits_per_byte"):
        low, high = result.intervals[name]
        assert low < result.measures[name] < high
    assert f"1000 resamples of {result.num_items} items" in result.intervals_rule
    assert (result.task, result.protocol_version, result.layout) == ("perplexity", "1", "one process")
    assert result.seconds > 0
    assert result.tokens_per_s > 0
    assert sum(row["targets"] for row in result.loss_by_position) == result.num_targets
    by_position = sum(row["targets"] * row["nll_per_token_nats"] for row in result.loss_by_position)
    assert by_position == pytest.approx(result.nll_sum_nats)


def test_a_limit_is_the_same_as_a_text_of_the_first_items_and_is_named(subject: Subject, lines: Path) -> None:
    some = lines.with_name("some.jsonl")
    some.write_text("".join(line + "\n" for line in lines.read_text().splitlines()[:2]))
    limited = run(find_task("perplexity"), subject, given_texts(lines), limit=2)
    whole = run(find_task("perplexity"), subject, given_texts(some)).result
    assert limited.result.measures == pytest.approx(whole.measures)
    assert limited.result.num_targets == whole.num_targets
    assert limited.prepared.documents is not None
    assert len(list(limited.prepared.documents)) == 2
    assert (limited.result.protocol, limited.result.limit) == ("perplexity-first2", 2)
    assert "the first 2 of 4 items" in limited.result.denominator
    everything = run(find_task("perplexity"), subject, given_texts(lines), limit=99).result
    assert (everything.protocol, everything.limit) == ("perplexity", None)


def test_a_limit_on_a_text_of_one_item_is_refused(subject: Subject, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(UsageError, match="--limit=3 takes the first items"):
        run(find_task("perplexity"), subject, given_texts(tmp_path / "a.txt"), limit=3)


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer: Tokenizer, build_gpt: Callable[..., Any]) -> None:
    subject = Subject(model=build_gpt(37), tokenizer=tokenizer, seq_len=16, vocab_size=37, dtype="fp32")
    with pytest.raises(DataError, match="but the model only 37"):
        check_vocabulary(subject)
