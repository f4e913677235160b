"""`lmtrain eval` on a masked model, and with a task that somebody has written down: what a user types and is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Toy, lmtrain
from tests.cli.test_bert import settings


@pytest.fixture(scope="module")
def bert(sentences: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert") / "run"
    lmtrain("pretrain", *settings(sentences, folder, train__steps=3))
    return folder


@pytest.mark.wide
def test_a_masked_model_is_measured_and_causal_tasks_are_refused(sentences: Toy, bert: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("return the number of tokens in the file and read the path")
    asked = ["--task", "masked/tokens", "--data", sentences.data, "--task", "masked/sentence-order"]
    asked += ["--data", sentences.data, "--task", "masked/pseudo-perplexity", "--data", tmp_path / "text.txt"]
    shown = lmtrain("eval", bert, *asked, "--device", "cpu", "--output", tmp_path / "o.json")
    results: list[dict[str, Any]] = json.loads((tmp_path / "o.json").read_text())["results"]
    assert [one["headline"] for one in results] == ["masked_token_perplexity", "pair_accuracy", "pseudo_perplexity"]
    assert 1 < results[0]["measures"]["masked_token_perplexity"] < 2 * 400
    assert 0 <= results[1]["measures"]["pair_accuracy"] <= 1
    assert "pair_accuracy" in shown
    assert "seed 1, the same whatever the batch size" in results[0]["notes"]["masks"]
    few = ["--limit", 2, "--samples", tmp_path / "s.jsonl", "--device", "cpu"]
    lmtrain("eval", bert, "--task", "masked/sentence-order", "--data", sentences.data, *few)
    first, second = (json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines())
    assert {first["targets"], second["targets"]} == {1}
    assert "target" not in first
    assert first["text"]
    said = lmtrain("eval", bert, "--task", "perplexity", "--data", sentences.data, code=2)
    assert "one of these tasks: masked/tokens, masked/pseudo-perplexity, masked/sentence-order" in said
    (tmp_path / "mine.yaml").write_text("like: choice/piqa\n")
    said = lmtrain("eval", bert, "--task", tmp_path / "mine.yaml", "--data", tmp_path / "text.txt", code=2)
    assert "--task=choice/mine does not fit the model: it scores the next token" in said


def test_a_task_of_ones_own(toy: Toy, tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "run", train__steps=3))
    (tmp_path / "rows.jsonl").write_text(
        '{"verb": "return", "ends": ["the number", "of"], "right": 0}\n'
        '{"verb": "read", "ends": ["x", "y"], "right": 1}\n'
    )
    (tmp_path / "mine.yaml").write_text('question: "def {verb}"\nchoices: ends\nanswer: right\n')
    asked = ["--task", tmp_path / "mine.yaml", "--data", tmp_path / "rows.jsonl", "--device", "cpu"]
    outputs = ["--output", tmp_path / "o.json", "--samples", tmp_path / "s.jsonl"]
    lmtrain("eval", tmp_path / "run", *asked, *outputs)
    (result,) = json.loads((tmp_path / "o.json").read_text())["results"]
    assert result["protocol"] == "choice/mine"
    assert set(result["measures"]) == {"accuracy", "per_character_accuracy", "chance_accuracy"}
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [row["right"] for row in rows] == [row["chosen"] == row["answer"] for row in rows]
    (tmp_path / "mine.yaml").write_text('question: "def {verb}:"\nchoices: ends\nanswer: right\n')
    assert "o.json is there already" in lmtrain("eval", tmp_path / "run", *asked, *outputs, code=73)
    assert sum(row["right"] for row in rows) / 2 == result["measures"]["accuracy"]
    (tmp_path / "mine.yaml").write_text('question: "def {noun}"\nchoices: ends\nanswer: right\n')
    said = lmtrain("eval", tmp_path / "run", *asked, code=65)
    assert f"rows.jsonl line 1 has no noun, and {tmp_path / 'mine.yaml'} line 1 (question) needs it." in said
    (tmp_path / "mine.yaml").write_text("choice: ends\n")
    said = lmtrain("eval", tmp_path / "run", *asked, code=2)
    assert "has the key choice, which no recipe has. Did you mean choices?" in said
