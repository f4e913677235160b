"""A run ends with exactly the document that was asked for, in every kind of input, and looks at nothing behind it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from data_tools.preprocess.length_and_script_filters import Filters
from data_tools.preprocess.preprocess_pipeline import Options, preprocess
from data_tools.preprocess.resumable_dataset_writer import Outputs
from data_tools.read.parse_chunks_and_bad_lines import OnError
from lmtrain.errors import UsageError
from tests.unit.data_tools.preprocess.test_pipeline import (
    SMALL,
    TEXTS,
    TOKENIZER,
    corpus,
    documents,
    expected,
    files,
    lines,
    run,
)

__all__ = ["corpus"]


@pytest.mark.parametrize("num_documents", [2, 7, 20, 25, 34, 43, 50, 54, 59, 60, 99])
def test_the_first_documents_of_every_kind_of_file(corpus: Path, tmp_path: Path, num_documents: int) -> None:
    summary = run(corpus, tmp_path / "out", max_documents=num_documents, workers=2)
    wanted = TEXTS[:num_documents]
    assert documents(tmp_path / "out") == expected(wanted)
    assert (summary.num_documents, summary.num_bytes) == (len(wanted), sum(len(text.encode()) for text in wanted))


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_that_are_left_out_do_not_count(corpus: Path, tmp_path: Path, workers: int) -> None:
    """The filters look at texts, so that two workers are processes."""
    filters = Filters(min_chars=60, max_tokens=150)
    kept = [text for text in TEXTS if len(text) >= 60 and len(TOKENIZER.encode(text)) <= 150]
    summary = run(corpus, tmp_path / "out", max_documents=21, filters=filters, workers=workers)
    assert documents(tmp_path / "out") == expected(kept[:21])
    before = TEXTS[: TEXTS.index(kept[20])]
    assert sum(summary.filtered.values()) == len(before) - 20


def test_text_files_cut_into_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\nof two lines\n\n\n\nanother\n \n\nthe third\n")
    for split, wanted in (("line", ["one", "of two lines"]), ("blank-line", ["one\nof two lines", "another"])):
        output = tmp_path / split
        run(tmp_path / "a.txt", output, text_split=split, max_documents=2)
        assert documents(output) == expected(wanted)


def test_a_bad_line_behind_the_last_document_is_not_met(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(TEXTS[:2]) + b"bad\n" + lines(TEXTS[2:4]) + b"\n" + b"bad\n" + lines(TEXTS[4:]))
    run(path, tmp_path / "two", max_documents=2)
    summary = run(path, tmp_path / "four", max_documents=4, on_error=OnError.SKIP)
    assert documents(tmp_path / "four") == expected(TEXTS[:4])
    assert summary.rejects == {"not valid JSON": 1}
    assert json.loads((tmp_path / "four.rejects.jsonl").read_text())["line"] == 3


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines(TEXTS))))
    preprocess(["-"], TOKENIZER, tmp_path / "out", Options(limits=SMALL, workers=2, max_documents=33))
    assert documents(tmp_path / "out") == expected(TEXTS[:33])


class Killed(BaseException):
    """A kill that the code under test cannot catch."""


@pytest.mark.parametrize("num_portions", [1, 3])
def test_a_killed_run_resumes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_portions: int
) -> None:
    run(corpus, tmp_path / "whole" / "out", max_documents=25)
    with monkeypatch.context() as patched:
        add, calls = Outputs.add, []

        def stop_after_some(*arguments: Any) -> None:
            add(*arguments)
            calls.append(1)
            if len(calls) == num_portions:
                raise Killed

        patched.setattr(Outputs, "add", stop_after_some)
        with pytest.raises(Killed):
            run(corpus, tmp_path / "killed" / "out", max_documents=25)
    summary = run(corpus, tmp_path / "killed" / "out", max_documents=25)
    assert summary.resumed_documents > 0
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


@pytest.mark.parametrize("number", [0, -3])
def test_at_least_one(number: int) -> None:
    with pytest.raises(UsageError, match=f"--max-documents={number} must be at least 1. Leave it out for all."):
        Options(max_documents=number)
    with pytest.raises(UsageError, match=f"--shard-tokens={number} must be at least 1. Leave it out for one dataset."):
        Options(shard_tokens=number)
