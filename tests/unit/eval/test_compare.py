"""Baselines score the model's own targets: a model that is the bigram gets the bigram's number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.errors import DataError
from lmtrain.eval.run_task import run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.statistics import WittenBellBigram, add_baselines
from lmtrain.eval.task import find_task
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.data.writing import add_document
from tests.unit.eval.conftest import given_texts


@pytest.fixture
def train(tmp_path: Path, tokenizer: Tokenizer, text: str) -> Path:
    with DatasetWriter(tmp_path / "train", np.dtype(np.uint16)) as writer:
        for line in text.split("\n"):
            add_document(writer, [np.array([*tokenizer.encode(line), tokenizer.eod_id], np.uint16)])
    return tmp_path / "train"


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ["The mill was cold .", "Nobody spoke", ""]))
    return path


def bigram_table(train: Path, tokenizer: Tokenizer) -> Any:
    counted = np.fromfile(f"{train}.bin", np.uint16)
    assert tokenizer.eod_id is not None
    bigram, size = WittenBellBigram(counted, tokenizer.vocab_size, tokenizer.eod_id), tokenizer.vocab_size
    contexts, tokens = np.divmod(np.arange(size * size), size)
    return np.log(bigram.probabilities(contexts, tokens)).reshape(size, size)


@pytest.mark.parametrize(("task", "limit"), [("perplexity", 1), ("wikitext2/lmeval-2.0", None)])
def test_a_model_that_is_the_bigram_gets_the_bigrams_number(
    task: str, limit: int | None, train: Path, held_out: Path, tokenizer: Tokenizer, build_table: Callable[..., Any]
) -> None:
    model = build_table(bigram_table(train, tokenizer))
    subject = Subject(model=model, tokenizer=tokenizer, seq_len=8, vocab_size=tokenizer.vocab_size, dtype="fp32")
    if task != "perplexity":
        held_out.write_text(held_out.read_text().replace('"text"', '"page"'))
    outcome = run(find_task(task), subject, given_texts(held_out) if task == "perplexity" else held_out, limit=limit)
    result, prepared = outcome.result, outcome.prepared
    compared = add_baselines(result, prepared, train, tokenizer)
    unigram, bigram = compared.baselines
    assert bigram.nll_sum_nats == pytest.approx(result.nll_sum_nats, rel=1e-12)
    assert bigram.bits_per_byte == pytest.approx(result.measures["bits_per_byte"], rel=1e-12)
    assert bigram.model_bits_ratio == pytest.approx(1)
    assert bigram.model_token_perplexity_ratio == pytest.approx(1)
    assert unigram.nll_sum_nats > bigram.nll_sum_nats
    assert unigram.model_bits_ratio == pytest.approx(bigram.bits_per_byte / unigram.bits_per_byte)
    assert compared.notes["baselines_counted_on"] == str(train)


def test_a_task_without_documents_has_no_baselines(
    tmp_path: Path, train: Path, tokenizer: Tokenizer, build_gpt: Callable[..., Any]
) -> None:
    (tmp_path / "l.jsonl").write_text('{"text": "the old mill"}\n')
    subject = Subject(
        model=build_gpt(tokenizer.vocab_size), tokenizer=tokenizer, seq_len=16, vocab_size=tokenizer.vocab_size,
        dtype="fp32",
    )  # fmt: skip
    outcome = run(find_task("lambada/megatron-strict"), subject, tmp_path / "l.jsonl")
    with pytest.raises(DataError, match="has no baselines"):
        add_baselines(outcome.result, outcome.prepared, train, tokenizer)
