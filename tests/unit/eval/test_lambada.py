"""LAMBADA's strict protocol: where a line is cut, how a word counts as right, and the corner lines."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.errors import DataError, UsageError
from lmtrain.eval.read_texts import read_text_file, suffix_of_text
from lmtrain.eval.run_task import run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import TaskOptions, find_task
from lmtrain.eval.tasks.lambada import split_last_word
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

TASK = find_task("lambada/megatron-strict")


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    return path


def follows(tokenizer: Tokenizer, texts: list[str]) -> Any:
    """Logits [V, V] that predict, after a token, what follows it in these texts: right where no token repeats."""
    table = np.zeros((tokenizer.vocab_size, tokenizer.vocab_size))
    for text in texts:
        ids = tokenizer.encode(text)
        table[ids[:-1], ids[1:]] += 5.0
    return table


@pytest.mark.parametrize("opened", [gzip.open, bz2.open, lzma.open])
def test_a_compressed_file_is_read_as_what_it_holds(opened: Any, tmp_path: Path) -> None:
    suffix = {gzip.open: "gz", bz2.open: "bz2", lzma.open: "xz"}[opened]
    plain, packed = tmp_path / "a.jsonl", tmp_path / f"a.jsonl.{suffix}"
    write(plain, ["One text.", "Another."])
    with opened(packed, "wb") as file:
        file.write(plain.read_bytes())
    assert read_text_file(packed) == read_text_file(plain)
    assert suffix_of_text(packed) == suffix_of_text(plain) == ".jsonl"
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"cannot be unpacked.*Give a complete .{suffix} file"):
        read_text_file(packed)


def test_what_is_compressed_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is compressed by zstd.*Give the file that `zstd -d"):
        read_text_file(tmp_path / "a.jsonl.zst")


def subject(model: Any, tokenizer: Tokenizer, seq_len: int = 64) -> Subject:
    return Subject(model=model, tokenizer=tokenizer, seq_len=seq_len, vocab_size=tokenizer.vocab_size, dtype="fp32")


@pytest.mark.wide
def test_counts_of_the_published_file(shared_data: Path) -> None:
    tokenizer = Tokenizer.load(shared_data / "gpt2-vocab.json")
    prepared = TASK.prepare(shared_data / "lambada_test.jsonl", TaskOptions(tokenizer=tokenizer, seq_len=1024))
    assert prepared.facts.num_documents == len(list(prepared.requests)) == 5153
    assert prepared.facts.notes == {"lines_cut_on_the_left": 0, "lines_of_one_word": 0}


@pytest.mark.parametrize(
    ("text", "context", "word"),
    [
        ("they met at the docks", "they met at the", "docks"),
        ("the  cold   night ", "the  cold", "night"),  # double spaces within stay, those around the cut go
        ("ends in a newline\n", "ends in a", "newline"),
        ("what was it?", "what was", "it?"),  # punctuation that touches the word is guessed with it
        ('he said "no"', "he said", '"no"'),
        ("no one no", "no one", "no"),  # the last of several
        ("a no-one one", "a no-one", "one"),  # also where an earlier word ends alike
        ("docks", "", "docks"),
        ("tab\tword", "tab", "word"),
    ],
)
def test_a_line_is_cut_before_its_last_word(text: str, context: str, word: str) -> None:
    assert split_last_word(text) == (context, word)


def test_a_word_counts_only_if_all_its_tokens_are_likeliest(
    tmp_path: Path, tokenizer: Tokenizer, build_table: Callable[..., Any]
) -> None:
    text = "Nobody xq"
    target = tokenizer.encode(" xq")
    assert len(target) > 1
    table = follows(tokenizer, [text])
    source = write(tmp_path / "a.jsonl", [text])
    right = run(TASK, subject(build_table(table), tokenizer), source).result
    assert right.measures["whole_word_accuracy"] == right.measures["target_token_accuracy"] == 1.0
    table[target[-2]] = 0.0
    table[target[-2], 0] = 1.0  # the last token is wrong now, the ones before it are still right
    wrong = run(TASK, subject(build_table(table), tokenizer), source).result
    assert wrong.measures["whole_word_accuracy"] == 0.0
    assert wrong.measures["target_token_accuracy"] == (len(target) - 1) / len(target)


def test_measures_follow_from_the_sum(tmp_path: Path, tokenizer: Tokenizer, build_gpt: Callable[..., Any]) -> None:
    texts = ["the mill was cold", "nobody spoke", "flour ; bran"]
    model = build_gpt(tokenizer.vocab_size, 64, std=0.05)
    result = run(TASK, subject(model, tokenizer), write(tmp_path / "a.jsonl", texts)).result
    words = [" cold", " spoke", " bran"]
    assert result.num_bytes == sum(map(len, words))
    assert result.num_targets == sum(len(tokenizer.encode(word)) for word in words)
    assert result.measures["last_word_perplexity"] == pytest.approx(math.exp(result.nll_sum_nats / 3))
    assert result.measures["bits_per_byte"] == pytest.approx(result.nll_sum_nats / math.log(2) / result.num_bytes)


def test_context_and_target_are_tokenized_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (request,) = TASK.prepare(
        write(tmp_path / "a.jsonl", ["the  old\n\nmill"]), TaskOptions(tokenizer=tokenizer, seq_len=64)
    ).requests
    context, target = tokenizer.encode("the  old"), tokenizer.encode(" mill")
    assert request.tokens.tolist() == context + target
    assert request.num_scored == len(target)


@pytest.mark.parametrize(
    ("name", "text", "context", "target"),
    [
        ("lambada/megatron-token", "the old mill", "the old", None),
        ("lambada/lmeval-openai-1.0", "the old mill", "the old", " mill"),
        ("lambada/lmeval-openai-1.0", "the old  mill", "the old", "  mill"),  # blanks go to the target
        ("lambada/lmeval-openai-1.0", "the old\nmill", "the", " old\nmill"),  # cut at single spaces only
        ("lambada/lmeval-openai-1.0", "the mill ", "the mill", " "),
        ("lambada/lmeval-openai-1.0", "mill", "", " mill"),
    ],
)
def test_each_protocol_cuts_a_line_in_its_own_place(
    name: str, text: str, context: str, target: str | None, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    prepared = find_task(name).prepare(
        write(tmp_path / "a.jsonl", [text]), TaskOptions(tokenizer=tokenizer, seq_len=64)
    )
    (request,) = prepared.requests
    assert tokenizer.eod_id is not None
    before = tokenizer.encode(context) or [tokenizer.eod_id]
    after = tokenizer.encode(text)[-1:] if target is None else tokenizer.encode(context + target)[len(before) :]
    if not context:
        after = tokenizer.encode(" mill")
    scored = target or tokenizer.decode(after)
    assert request.tokens[-request.num_scored :].tolist() == after
    if target is not None:
        assert request.tokens.tolist() == before + after
    assert prepared.facts.num_bytes == len(scored.encode())


def test_the_original_text_is_read_line_by_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "plain.txt").write_text("the old mill\n\nflour\r\n")
    task = find_task("lambada/lmeval-standard-1.0")
    facts = task.prepare(tmp_path / "plain.txt", TaskOptions(tokenizer=tokenizer, seq_len=64)).facts
    assert (facts.num_documents, facts.notes["lines_of_one_word"]) == (2, 1)
    assert facts.notes["carriage_returns_scored_as_text"] == 1
    source = write(tmp_path / "a.jsonl", ["the old mill"])
    assert task.prepare(source, TaskOptions(tokenizer=tokenizer, seq_len=64)).num_targets
    options = TaskOptions(tokenizer=tokenizer, seq_len=64)
    with pytest.raises(DataError, match="line 1"):
        find_task("lambada/lmeval-openai-1.0").prepare(tmp_path / "plain.txt", options)


def test_an_empty_context_is_the_end_of_document_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prepared = TASK.prepare(
        write(tmp_path / "a.jsonl", ["mill", "the mill"]), TaskOptions(tokenizer=tokenizer, seq_len=64)
    )
    first, second = prepared.requests
    assert first.tokens.tolist() == [tokenizer.eod_id, *tokenizer.encode(" mill")]
    assert tokenizer.eod_id not in second.tokens
    assert prepared.facts.notes["lines_of_one_word"] == 1


def test_long_lines_are_cut_on_the_left_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write(tmp_path / "a.jsonl", ["nobody in the old house dared to speak of the mill", "a mill"])
    prepared = TASK.prepare(source, TaskOptions(tokenizer=tokenizer, seq_len=8))
    long, _ = prepared.requests
    everything = tokenizer.encode("nobody in the old house dared to speak of the") + tokenizer.encode(" mill")
    assert long.tokens.tolist() == everything[-9:]
    assert prepared.facts.notes["lines_cut_on_the_left"] == 1


def test_blank_lines_are_no_samples_and_unicode_line_breaks_stay_inside(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write(tmp_path / "a.jsonl", ["the\u2028old mill"])
    source.write_text(source.read_text() + "\n\n")
    assert TASK.prepare(source, TaskOptions(tokenizer=tokenizer, seq_len=64)).facts.num_documents == 1


@pytest.mark.parametrize("line", ["plain text", '{"page": "a b"}', "[1]", '{"text": 3}', "[" * 100_000])
def test_lines_of_another_kind_are_named(tmp_path: Path, tokenizer: Tokenizer, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a b"}}\n{line}\n')
    with pytest.raises(DataError, match="line 2"):
        TASK.prepare(tmp_path / "a.jsonl", TaskOptions(tokenizer=tokenizer, seq_len=64))


def test_refusals(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="no word"):
        TASK.prepare(write(tmp_path / "a.jsonl", [" \n"]), TaskOptions(tokenizer=tokenizer, seq_len=64))
    with pytest.raises(UsageError, match="no overlapping windows"):
        TASK.prepare(write(tmp_path / "a.jsonl", ["a b"]), TaskOptions(tokenizer=tokenizer, seq_len=64, stride=8))
    with pytest.raises(DataError, match="the window takes 1 to 2"):
        TASK.prepare(write(tmp_path / "a.jsonl", ["a zqzqzqzq"]), TaskOptions(tokenizer=tokenizer, seq_len=2))
