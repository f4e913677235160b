"""Any text or dataset: documents stay apart, a text and its dataset agree, counts and refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.errors import DataError, MissingInputError
from lmtrain.eval.run_task import run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import Result, TaskOptions
from lmtrain.eval.tasks.perplexity import TASK
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.data.writing import add_document
from tests.unit.eval.conftest import given_texts

SEQ_LEN = 16
TEXTS = ["The old mill was cold .", "", "Nobody dared to speak ! \u00e9\u20ac", "x"]


@pytest.fixture
def subject(tokenizer: Tokenizer, build_gpt: Callable[..., Any]) -> Subject:
    model = build_gpt(tokenizer.vocab_size, SEQ_LEN, std=0.1)
    return Subject(model=model, tokenizer=tokenizer, seq_len=SEQ_LEN, vocab_size=tokenizer.vocab_size, dtype="fp32")


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def write_dataset(prefix: Path, tokenizer: Tokenizer, *, closed: bool, num_bytes: int | None = None) -> Path:
    """Write the same texts as Megatron's files, each closed by an end-of-document token or not.

    `num_bytes` stands in a sidecar as the size of the texts; without it there is none.
    """
    assert tokenizer.eod_id is not None
    with DatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        if num_bytes is not None:
            writer.describe(
                tokenizer=tokenizer.to_bytes(), fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size,
                eod_id=tokenizer.eod_id, num_bytes=num_bytes,
            )  # fmt: skip
        for text in TEXTS:
            ids = tokenizer.encode(text) + [tokenizer.eod_id] * closed
            add_document(writer, [np.array(ids, np.uint16)])
    return prefix


def measured(subject: Subject, source: Path, stride: int | None = None) -> Result:
    given = given_texts(source) if source.suffix in (".txt", ".jsonl") else source
    return run(TASK, subject, given, stride=stride).result


def test_documents_are_scored_apart(subject: Subject, jsonl: Path, tmp_path: Path) -> None:
    whole = measured(subject, jsonl)
    apart = 0.0
    for number, text in enumerate(TEXTS):
        if text:
            path = tmp_path / f"{number}.txt"
            path.write_text(text)
            apart += measured(subject, path).nll_sum_nats
    assert whole.nll_sum_nats == pytest.approx(apart, rel=1e-6)
    assert whole.num_documents == 4
    joined = tmp_path / "joined.txt"
    joined.write_text("".join(TEXTS))
    assert abs(measured(subject, joined).nll_sum_nats - apart) > 1e-3  # the mistake that concatenates


def test_counts(subject: Subject, jsonl: Path, tokenizer: Tokenizer) -> None:
    result = measured(subject, jsonl)
    num_tokens = sum(len(ids) for ids in tokenizer.encode_batch(TEXTS))
    assert result.num_tokens == result.num_targets == num_tokens
    assert result.num_bytes == sum(len(text.encode()) for text in TEXTS)
    assert result.num_words == sum(len(text.split()) for text in TEXTS)
    assert result.stride == SEQ_LEN // 2
    assert result.measures["token_perplexity"] == pytest.approx(math.exp(result.nll_sum_nats / num_tokens))
    assert result.measures["word_perplexity"] == pytest.approx(math.exp(result.nll_sum_nats / result.num_words))


@pytest.mark.parametrize("closed", [True, False])
def test_a_text_and_its_dataset_give_the_same_numbers(
    subject: Subject, jsonl: Path, tmp_path: Path, tokenizer: Tokenizer, closed: bool
) -> None:
    prefix = write_dataset(tmp_path / "set.v1", tokenizer, closed=closed)
    text = measured(subject, jsonl)
    for source in (prefix, Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
        dataset = measured(subject, source)
        assert dataset.nll_sum_nats == text.nll_sum_nats
        assert (dataset.num_targets, dataset.num_bytes) == (text.num_targets, text.num_bytes)
    assert dataset.num_words is None
    assert "word_perplexity" not in dataset.measures


def test_a_dataset_is_divided_by_the_bytes_of_its_source_and_not_of_its_tokens(
    subject: Subject, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A tokenizer that folds case or blanks drops bytes of a text, so the two counts differ."""
    num_bytes = 2 * sum(len(text.encode()) for text in TEXTS)
    result = measured(subject, write_dataset(tmp_path / "set", tokenizer, closed=True, num_bytes=num_bytes))
    assert result.num_bytes == num_bytes
    assert result.measures["bits_per_byte"] == pytest.approx(result.nll_sum_nats / math.log(2) / num_bytes)


def test_more_context_by_a_smaller_stride_changes_the_number_not_the_count(subject: Subject, jsonl: Path) -> None:
    far, near = measured(subject, jsonl, SEQ_LEN), measured(subject, jsonl, 1)
    assert far.num_targets == near.num_targets
    assert far.nll_sum_nats != near.nll_sum_nats


def test_the_first_token_is_conditioned_on_the_end_of_document(subject: Subject, jsonl: Path) -> None:
    prepared = TASK.prepare_texts(given_texts(jsonl), TaskOptions(tokenizer=subject.tokenizer, seq_len=SEQ_LEN))
    first = next(iter(prepared.requests))
    assert first.tokens[0] == subject.tokenizer.eod_id
    assert first.num_scored == len(first.tokens) - 1


def test_a_dataset_of_a_larger_vocabulary_is_refused(subject: Subject, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", np.dtype(np.uint16)) as writer:
        add_document(writer, [np.array([1, 60000], np.uint16)])
    with pytest.raises(DataError, match="holds the id 60000"):
        measured(subject, tmp_path / "set")


def test_refusals(subject: Subject, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="absent"):
        measured(subject, tmp_path / "absent")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="no token that could be predicted"):
        measured(subject, tmp_path / "empty.txt")
    (tmp_path / "blank.txt").write_text(" \n\n ")
    with pytest.raises(DataError, match="holds no word, only 4 blank bytes"):
        measured(subject, tmp_path / "blank.txt")


def test_files_are_measured_by_themselves_too(subject: Subject, tmp_path: Path) -> None:
    for name, texts in (("a", TEXTS[:1]), ("b", TEXTS[1:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    whole = run(TASK, subject, given_texts(tmp_path)).result
    assert list(whole.groups) == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    for path, measures in whole.groups.items():
        alone = measured(subject, Path(path))
        assert alone.groups == {}
        assert measures == pytest.approx(alone.measures, rel=1e-6)


def test_what_is_no_text_is_counted(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "\ufeffone\r\ntwo\r\n"}) + "\n")
    notes = measured(subject, tmp_path / "a.jsonl").notes
    assert (notes["carriage_returns_scored_as_text"], notes["byte_order_marks_scored_as_text"]) == (2, 1)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "one\ntwo\n"}) + "\n")
    assert set(measured(subject, tmp_path / "b.jsonl").notes) == {"text_sha256_of"}
