"""BERT as a user meets it: sentences, masked samples, a run that goes on where it stopped, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain
from tests.marks import wide

EXACT = ("loss", "loss/mlm", "loss/pair", "grad_norm", "lr", "samples", "samples_hash")

NO_PAIRS = {"model__pair_head": "false", "data__pairs": "none"}
MEGATRON = {"data__order": "megatron", "data__megatron_samples": 200, "data__first_sample": 100}


def settings(toy: Toy, folder: Path, **changes: object) -> list[str]:
    given = {"data__split": "[0.8,0.2]", "model__dropout": 0.1} | changes
    return ["model=bert_tiny", "data=masked", *toy.settings(folder, **given)]


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == event]


@pytest.fixture(scope="module")
def run(sentences: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert") / "run"
    changes = {"train__valid_interval_steps": 6, "train__valid_samples": 5, "observe__tensorboard": "true"}
    lmtrain("pretrain", *settings(sentences, folder, **changes))
    return folder


def test_it_trains_and_says_each_term(run: Path) -> None:
    steps = rows(run, "step")
    assert [row["step"] for row in steps] == list(range(1, 13))
    for row in steps:
        assert row["loss"] == pytest.approx(row["loss/mlm"] + row["loss/pair"], rel=1e-6)
        assert 0.3 < row["loss/pair"] < 1.2
    assert steps[-1]["loss/mlm"] < steps[0]["loss/mlm"]
    assert 48 * 5 <= steps[-1]["tokens"] < 48 * 32, "padding was counted"
    assert "bert" in lmtrain("inspect", run)
    log = (run / "log.txt").read_text()
    assert "(mlm " in log
    assert "accuracy" in log


def test_validation_says_perplexity_and_accuracy(run: Path) -> None:
    first, last = rows(run, "valid")
    for row in (first, last):
        assert row["loss"] == pytest.approx(row["loss/mlm"] + row["loss/pair"])
        assert 1 < row["ppl"] < 400
        assert 0 <= row["accuracy"] <= 1
        assert row["accuracy/pair"] * 5 == pytest.approx(round(row["accuracy/pair"] * 5))
        assert row["samples"] == 5
        assert 5 <= row["tokens"] < 5 * 32
    assert last["ppl"] < first["ppl"]


@pytest.mark.wide
def test_resumed_it_is_the_same_to_the_bit(sentences: Toy, run: Path, tmp_path: Path) -> None:
    lmtrain("pretrain", *settings(sentences, tmp_path, checkpoint__resume=run / "checkpoints/step_00000008"))
    ours, theirs = ([[row[key] for key in EXACT] for row in rows(folder, "step")] for folder in (tmp_path, run))
    assert ours == theirs[8:]
    roots = []
    for folder in (tmp_path, run):
        manifest = json.loads((folder / "checkpoints/step_00000012/manifest.json").read_text())
        roots.append({n: entry["root"] for n, entry in manifest["files"].items() if n.endswith(".safetensors")})
    assert roots[0] == roots[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"model__norm_order": "post", "data__pairs": "next_sentence", "data__max_ngram": 3},
        NO_PAIRS | MEGATRON,
        *wide(NO_PAIRS | {"data__first_sample": 100}, MEGATRON),
    ],
    ids=["next_sentence", "none in megatron's order", "none", "megatron"],
)
def test_every_kind_of_sample_trains(sentences: Toy, tmp_path: Path, changes: dict[str, object]) -> None:
    lmtrain("pretrain", *settings(sentences, tmp_path / "run", train__steps=2, schedule__warmup_steps=1, **changes))
    steps = rows(tmp_path / "run", "step")
    assert len(steps) == 2
    assert ("loss/pair" in steps[0]) == ("model__pair_head" not in changes)


def test_other_masks_are_another_run(sentences: Toy, run: Path) -> None:
    told = lmtrain("pretrain", *settings(sentences, run, data__mask_share=0.3), code=65)
    assert "data: mask_share is 0.3, and was 0.15" in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__pair_head": "false"}, ["model.pair_head=false does not use", "model.pair_head=true"]),
        ({"data__pairs": "none"}, ["model.pair_head=true needs sentence pairs", "model.pair_head=false"]),
        ({"model__seq_len": 4}, ["A sequence length of 4 tokens", "8 or more"]),
    ],
)
def test_wrong_settings_are_refused(
    sentences: Toy, tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    told = lmtrain("pretrain", *settings(sentences, tmp_path / "run", **changes), code=2)
    for word in words:
        assert word in told


def test_a_model_and_samples_that_do_not_fit(sentences: Toy, tmp_path: Path) -> None:
    given = sentences.settings(tmp_path / "run")
    told = lmtrain("pretrain", "model=bert_tiny", "data=dataset", *given, code=2)
    assert "data.kind=dataset makes samples that a bert model cannot learn from. Use data=masked" in told
    told = lmtrain("pretrain", "data=masked", *given, code=2)
    assert "data.kind=masked makes samples that a gpt model cannot learn from" in told


def test_documents_without_sentences_are_refused(sentences: Toy, toy: Toy, tmp_path: Path) -> None:
    data = tmp_path / "whole"
    lmtrain("preprocess", sentences.text, "--tokenizer", sentences.tokenizer, "--output", data)
    told = lmtrain("pretrain", *settings(replace(sentences, data=data), tmp_path / "run"), code=65)
    assert "one sequence per document" in told
    assert "--split-sentences" in told
    told = lmtrain("pretrain", *settings(toy, tmp_path / "run"), code=65)
    assert "The tokenizer has no [CLS], [SEP], [MASK], [PAD]" in told


def test_a_dry_run_counts_it(sentences: Toy, tmp_path: Path) -> None:
    told = json.loads(lmtrain("pretrain", *settings(sentences, tmp_path / "run"), "--dry-run", "--json"))
    assert told["model"] == "bert"
    assert told["training_samples"] > 50
