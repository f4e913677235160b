"""The recipe beneath the number: every key the protocols ask for, in JSON and within 80 columns."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

from lmtrain.eval.print_evaluation_results import render, render_comparison, render_tasks
from lmtrain.eval.statistics import Comparison, Difference
from lmtrain.eval.task import BaselineResult, Result, all_tasks
from lmtrain.units import format_measure

RESULT = Result(
    protocol="perplexity", data="held.jsonl", text_sha256="ab" * 32, num_documents=3, num_words=1200,
    words_rule="len(text.split())", num_bytes=7000, bytes_rule="UTF-8 bytes of the documents", num_tokens=2000,
    num_targets=2000, seq_len=128, stride=64, prefix="end of document, before each document", dtype="fp32",
    tokenizer_fingerprint="cd" * 32, denominator="tokens = 2000", nll_sum_nats=7654.321, headline="token_perplexity",
    measures={"token_perplexity": 45.94, "bits_per_byte": 1.5775, "token_accuracy": 0.25, "word_perplexity": math.inf},
    num_items=3, intervals={"token_perplexity": (44.1, 47.85)}, intervals_rule="middle 95% of 1000 resamples",
    loss_by_position=({"tokens_before_from": 4, "tokens_before_to": 7, "targets": 90, "nll_per_token_nats": 4.5},),
    seconds=3.21, tokens_per_s=1234.0, lmtrain="9.8.7", notes={"baselines_counted_on": "data/train"},
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


def shown(width: int = 80, *, full: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(RESULT, {"checkpoint": "runs/a/checkpoints/step_00000100", "parameters": 1234}, full=full))
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
        "window 128, stride 64",
        "end of document",
        "7654.321000 nats",
        "fp32",
        "ab" * 20,
    ]
    words += ["cd" * 20, "tokens = 2000", "data/train", "44.10 to 47.85", "1000 resamples", "4 to 7", "4.5000"]
    words += ["one process", "1 of the protocol perplexity", "3.2s, 1.23k tokens/s fed", "9.8.7"]
    assert [word for word in words if word not in text] == []


def test_a_person_sees_six_lines_with_what_the_number_means_nothing_without() -> None:
    lines = shown(120, full=False).splitlines()
    lines = lines[:1] + lines[lines.index(next(line for line in lines if line.startswith("also"))) :]
    assert len(lines) <= 7
    text = " ".join(line.rstrip() for line in lines)
    words = ["perplexity  token_perplexity 45.94", "95% interval 44.10 to 47.85, 3 items", "step_00000100", "fp32"]
    words += ["held.jsonl", "abababababab;", "1,200 words", "window 128, stride 64", "tokens = 2000", "7654.321 nats"]
    assert [word for word in words if word not in text] == []


def test_sources_are_shown_where_they_are_few_and_in_full() -> None:
    for count, full, there in ((2, False, True), (9, False, False), (9, True, True)):
        groups = {f"source_{n}.txt": {"token_perplexity": 40.25 + n} for n in range(count)}
        console = Console(file=io.StringIO(), width=80)
        console.print(render(dataclasses.replace(RESULT, groups=groups), {}, full=full))
        assert isinstance(console.file, io.StringIO)
        assert ("source_1.txt" in console.file.getvalue()) is there
        assert ("41.25" in console.file.getvalue()) is there


def test_a_part_of_a_text_is_marked_and_one_item_has_no_interval() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(dataclasses.replace(RESULT, limit=100), {}))
    console.print(render(dataclasses.replace(RESULT, num_items=1, intervals={}), {}))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "perplexity  PARTIAL: the first 100 items  token_perplexity" in text
    assert "one item: no interval" in text


def test_what_does_not_fit_the_first_line_goes_whole_onto_the_next() -> None:
    long = dataclasses.replace(RESULT, protocol="wikitext103/megatron-o32-s128", limit=7)
    console = Console(file=io.StringIO(), width=80)
    console.print(render(long, {}))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[:2] == [
        "wikitext103/megatron-o32-s128  PARTIAL: the first 7 items",
        "        token_perplexity 45.94  (95% interval 44.10 to 47.85, 3 items)",
    ]


def test_a_comparison_says_what_is_clear() -> None:
    differences = {
        "token_perplexity": Difference(45.94, 44.0, -1.94, (-2.5, -1.1)),
        "bits_per_byte": Difference(1.5775, 1.58, 0.0025, (-0.001, 0.003)),
        "token_accuracy": Difference(0.25, 0.26, 0.01, None),
    }
    comparison = Comparison("perplexity", "perplexity", "token_perplexity", "held.jsonl", 3, differences, ("word_x",))
    text = ""
    for full in (False, True):
        console = Console(file=io.StringIO(), width=80)
        console.print(render_comparison(comparison, full=full))
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= 80
        assert ("token_accuracy" in text) is full
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["token_perplexity"][3:] == ["-1.94", "-2.50", "to", "-1.10", "yes"]
    assert lines["bits_per_byte"][3:] == ["+0.0025", "-0.0010", "to", "+0.0030", "no"]
    assert lines["token_accuracy"][-1] == "-"
    assert "word_x: the tokenizers differ" in text


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
    console.print(
        render(dataclasses.replace(RESULT, num_words=None, words_rule="not counted", stride=None), {}, full=True)
    )
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
        ("word_perplexity", 55620931956.91, "5.562e+10"),
    ],
)
def test_measures_are_shown_as_papers_show_them(name: str, value: float, text: str) -> None:
    assert format_measure(name, value) == text
