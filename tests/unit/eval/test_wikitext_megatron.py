"""The WikiText-103 protocol: counts on the real file, the adjusted denominator, the cap, what it refuses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_tools.corpora.corpus_definition import published_hashes
from lmtrain.errors import DataError, MissingInputError, UsageError
from lmtrain.eval.run_task import prepare, run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import NOT_PUBLISHED, TaskOptions, all_tasks, find_task, sum_columns
from lmtrain.eval.tasks.wikitext import split_articles
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.eval.protocols import WIKI

SEQ_LEN = 64
TASK = find_task("wikitext103/megatron-o32")


@pytest.fixture
def source(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "wiki.test.tokens"
    path.write_text(text * 3, newline="")
    return path


@pytest.mark.wide
def test_counts_of_the_published_file(shared_data: Path) -> None:
    tokenizer = Tokenizer.load(shared_data / "gpt2-vocab.json")
    prepared = TASK.prepare(shared_data / "wt103.wiki.test.tokens", TaskOptions(tokenizer=tokenizer, seq_len=1024))
    assert prepared.facts.num_words == 245_566
    assert prepared.facts.num_tokens == 270_330
    assert prepared.num_targets == sum(r.num_scored for r in prepared.requests) == 270_329
    assert (prepared.facts.num_documents, prepared.facts.protocol) == (62, "wikitext103/megatron-o32")
    assert prepared.text_columns["words"].sum() == 245_565
    assert prepared.text_columns["bytes"].sum() == 1_281_077


def test_another_text_than_the_published_one_is_noted(source: Path, tokenizer: Tokenizer) -> None:
    own = hashlib.sha256(source.read_bytes()).hexdigest()
    for hashes, noted in ({}, None), ({"wiki.test.tokens": "another"}, "wiki.test.tokens"), ({source.name: own}, None):
        prepared, _ = prepare(TASK, source, TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN, hashes=hashes))
        assert prepared.facts.notes.get(NOT_PUBLISHED) == noted
    named = {task.published for task in all_tasks().values() if task.published}
    assert named == published_hashes().keys() - {"wiki.valid.tokens", "lambada_development_plain_text.txt"}


def test_the_number_follows_from_the_sum_and_the_original_words(
    source: Path, text: str, tokenizer: Tokenizer, build_gpt: Callable[..., Any]
) -> None:
    model = build_gpt(tokenizer.vocab_size, SEQ_LEN, std=0.05)
    subject = Subject(model=model, tokenizer=tokenizer, seq_len=SEQ_LEN, vocab_size=tokenizer.vocab_size, dtype="fp32")
    result = run(TASK, subject, source).result
    num_words = len((text * 3).strip().split(" "))
    assert result.num_words == num_words
    assert result.num_targets == result.num_tokens - 1
    assert result.measures["word_perplexity_adjusted"] == math.exp(min(20, result.nll_sum_nats / (num_words - 1)))
    assert result.measures["token_perplexity"] == pytest.approx(math.exp(result.nll_sum_nats / result.num_targets))
    assert result.measures["bits_per_byte"] == pytest.approx(
        result.nll_sum_nats / math.log(2) / len((text * 3).encode())
    )
    assert (result.stride, result.prefix) == (32, "none")


def test_words_are_counted_between_single_spaces_before_detokenizing(source: Path, tokenizer: Tokenizer) -> None:
    facts = TASK.prepare(source, TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN)).facts
    original = source.read_text()
    assert facts.num_words == original.strip().count(" ") + 1
    assert facts.num_words != len(original.split())  # the mistake that ignores newline tokens


def test_the_cap_is_on_the_perplexity_and_not_on_the_loss(source: Path, tokenizer: Tokenizer) -> None:
    known = TASK.prepare(source, TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN)).text_columns
    measures = TASK.measures(sum_columns(known) | {"nll": 1e6, "targets": 100})
    assert measures["word_perplexity_adjusted"] == measures["token_perplexity"] == math.exp(20)
    assert measures["nll_per_token_nats"] == 1e4


def test_words_and_bytes_of_articles_add_up_to_the_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "wiki"
    path.write_text(WIKI)
    prepared = TASK.prepare(path, TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN))
    assert prepared.facts.num_documents == len(prepared.text_columns["words"]) == 4
    assert prepared.text_columns["words"].sum() == prepared.facts.num_words - 1  # type: ignore[operator]
    assert prepared.text_columns["bytes"].tolist() == [len(part.encode()) for part in split_articles(WIKI)]
    by_article = [sum(r.num_scored for r in prepared.requests if r.item == item) for item in range(4)]
    assert sum(by_article) == prepared.num_targets
    assert min(by_article) > 0


@pytest.mark.parametrize(
    ("name", "seq_len", "protocol"),
    [
        ("wikitext103/megatron-o32", 1024, "wikitext103/megatron-o32"),
        ("wikitext103/megatron-o32", 2048, "wikitext103/megatron-o32-s2048"),
        ("wikitext103/megatron-o64", 512, "wikitext103/megatron-o64-s512"),
    ],
)
def test_another_window_than_the_published_is_in_the_id(
    name: str, seq_len: int, protocol: str, source: Path, tokenizer: Tokenizer
) -> None:
    asked = TaskOptions(tokenizer=tokenizer, seq_len=seq_len)
    assert find_task(name).prepare(source, asked).facts.protocol == protocol


def test_no_newline_is_translated(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "wiki"
    path.write_bytes(b" a \r\n b \n ")
    facts = TASK.prepare(path, TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN)).facts
    assert facts.num_bytes == 10
    assert facts.notes["carriage_returns_scored_as_text"] == 1
    path.write_bytes("\ufeff a b".encode())
    facts = TASK.prepare(path, TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN)).facts
    assert facts.notes["byte_order_marks_scored_as_text"] == 1


def test_refusals(tmp_path: Path, source: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="stride=16 does not apply to wikitext103/megatron-o32"):
        TASK.prepare(source, TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN, stride=16))
    with pytest.raises(UsageError, match="stride of 32 does not fit seq_len=16"):
        list(TASK.prepare(source, TaskOptions(tokenizer=tokenizer, seq_len=16)).requests)
    (tmp_path / "blank").write_text(" \n \n  ")
    with pytest.raises(DataError, match="holds no word, only 6 blank characters"):
        TASK.prepare(tmp_path / "blank", TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN))
    (tmp_path / "one").write_text(" word \n")
    with pytest.raises(DataError, match="has one word"):
        TASK.prepare(tmp_path / "one", TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN))
    with pytest.raises(MissingInputError, match="does not exist"):
        TASK.prepare(tmp_path / "absent", TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN))
    (tmp_path / "latin").write_bytes(b"caf\xe9 ")
    with pytest.raises(DataError, match="not UTF-8 at byte 3"):
        TASK.prepare(tmp_path / "latin", TaskOptions(tokenizer=tokenizer, seq_len=SEQ_LEN))
