"""The recipe beneath the number: every key the protocols ask for, in JSON and within 80 columns."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from lmtrain.eval.report import render, render_tasks
from lmtrain.eval.result import BaselineResult, Result
from lmtrain.eval.task import all_tasks
from lmtrain.observe.words import show_measure

RESULT = Result(
    protocol="perplexity", data="held.jsonl", text_sha256="ab" * 32, num_documents=3, num_words=1200,
    words_rule="len(text.split())", num_bytes=7000, bytes_rule="UTF-8 bytes of the documents", num_tokens=2000,
    num_targets=2000, seq_len=128, stride=64, prefix="end of document, before each document", dtype="fp32",
    tokenizer_fingerprint="cd" * 32, denominator="tokens = 2000", nll_sum_nats=7654.321, headline="token_perplexity",
    measures={"token_perplexity": 45.94, "bits_per_byte": 1.5775, "token_accuracy": 0.25, "word_perplexity": math.inf},
    notes={"baselines_counted_on": "data/train"},
    baselines=(
        BaselineResult(
            name="bigram (Witten-Bell)", nll_sum_nats=9000.0, bits_per_byte=1.8549, token_perplexity=90.0,
            model_bits_ratio=0.85, model_token_perplexity_ratio=0.51,
        ),
    ),
)  # fmt: skip
RECIPE_KEYS = {
    "protocol", "text_sha256", "num_documents", "num_words", "words_rule", "num_bytes", "num_tokens", "num_targets",
    "seq_len", "stride", "prefix", "dtype", "tokenizer_fingerprint", "denominator", "nll_sum_nats", "measures",
}  # fmt: skip


def shown(width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(RESULT, {"checkpoint": "runs/a/checkpoints/step_00000100", "parameters": 1234}))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_has_every_key_of_the_recipe_and_no_infinity() -> None:
    plain = RESULT.to_dict()
    assert plain.keys() >= RECIPE_KEYS
    assert plain["measures"]["word_perplexity"] is None
    assert json.loads(json.dumps(plain, allow_nan=False))["baselines"][0]["name"] == "bigram (Witten-Bell)"
    assert "perplexity" not in {*plain, *plain["measures"]}


def test_the_table_shows_the_number_and_its_whole_recipe() -> None:
    text = shown()
    words = ["45.94", "1.5775", "25.00 %", "too large", "bigram (Witten-Bell)", "0.850", "step_00000100", "held.jsonl"]
    words += [
        "1,200",
        "7,000",
        "2,000",
        "seq_len 128, stride 64",
        "end of document",
        "7654.321000 nats",
        "fp32",
        "ab" * 20,
    ]
    words += ["cd" * 20, "tokens = 2000", "data/train"]
    assert [word for word in words if word not in text] == []


def test_nothing_is_wider_than_80_columns() -> None:
    assert max(map(len, shown().splitlines())) <= 80
    console = Console(file=io.StringIO(), width=80)
    console.print(render_tasks(all_tasks()))
    assert isinstance(console.file, io.StringIO)
    listing = console.file.getvalue()
    assert max(map(len, listing.splitlines())) <= 80
    assert all(name in listing for name in all_tasks())


def test_a_result_without_words_says_so() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(render(dataclasses.replace(RESULT, num_words=None, words_rule="not counted", stride=None), {}))
    assert isinstance(console.file, io.StringIO)
    assert "not counted" in console.file.getvalue()
    assert "stride none" in console.file.getvalue()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("whole_word_accuracy", 0.6651, "66.51 %"),
        ("token_perplexity", 12345.678, "12,345.68"),
        ("bits_per_byte", 0.98765, "0.9877"),
        ("bits_per_byte", math.nan, "undefined"),
    ],
)
def test_measures_are_shown_as_papers_show_them(name: str, value: float, text: str) -> None:
    assert show_measure(name, value) == text
