"""The harness's WikiText: one text under two names, pages from a file or given, baselines, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmtrain.errors import DataError, UsageError
from lmtrain.eval.run_task import run
from lmtrain.eval.score_targets import Subject
from lmtrain.eval.task import TaskOptions, find_task
from lmtrain.eval.tasks.wikitext import count_words, split_pages
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.eval.protocols import WIKI

NAMES = ["wikitext103/lmeval-2.0", "wikitext2/lmeval-2.0"]


@pytest.mark.wide
def test_counts_of_the_real_file(shared_data: Path) -> None:
    """Of the raw file of which only the layout of lines differs from the published one."""
    tokenizer = Tokenizer.load(shared_data / "gpt2-vocab.json")
    prepared = find_task(NAMES[0]).prepare(
        shared_data / "wiki.test.raw", TaskOptions(tokenizer=tokenizer, seq_len=1024)
    )
    assert prepared.facts.num_documents == 62
    assert prepared.num_targets == sum(request.num_scored for request in prepared.requests)


def test_blanks_at_either_end_of_a_page_are_words() -> None:
    assert count_words(" = Mill = \n \n The mill . \n ") == 1 + len(["=", "Mill", "=", "The", "mill", "."]) + 1
    assert count_words("mill") == 1


def test_a_file_its_pages_and_both_names_give_the_same_number(
    tmp_path: Path, tokenizer: Tokenizer, build_gpt: Callable[..., Any]
) -> None:
    model = build_gpt(tokenizer.vocab_size, 40, std=0.1)
    subject = Subject(model=model, tokenizer=tokenizer, seq_len=40, vocab_size=tokenizer.vocab_size, dtype="fp32")
    (tmp_path / "wiki.test.raw").write_text(WIKI)
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in split_pages(WIKI)))
    results = [run(find_task(n), subject, tmp_path / f).result for n in NAMES for f in ("wiki.test.raw", "pages.jsonl")]
    assert [result.protocol for result in results] == [NAMES[0], NAMES[0], NAMES[1], NAMES[1]]
    assert {result.protocol_version for result in results} == {"2.0"}
    assert len({result.nll_sum_nats for result in results}) == 1
    assert len({tuple(result.measures.items()) for result in results}) == 1
    short = run(find_task(NAMES[0]), subject, tmp_path / "wiki.test.raw", seq_len=16).result
    assert (short.protocol, short.seq_len) == (f"{NAMES[0]}-s16", 16)


def test_refusals(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "wiki").write_text(WIKI)
    with pytest.raises(UsageError, match="which has no overlapping windows"):
        find_task(NAMES[0]).prepare(tmp_path / "wiki", TaskOptions(tokenizer=tokenizer, seq_len=40, stride=8))
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match='line 1 is not JSON with a "page"'):
        find_task(NAMES[0]).prepare(tmp_path / "texts.jsonl", TaskOptions(tokenizer=tokenizer, seq_len=40))
    (tmp_path / "blank").write_text("\n\n")
    with pytest.raises(DataError, match="holds no word"):
        find_task(NAMES[0]).prepare(tmp_path / "blank", TaskOptions(tokenizer=tokenizer, seq_len=40))
