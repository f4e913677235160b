"""The strides of Hugging Face's page: rows, counts, the weighting, and by article."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.errors import DataError, UsageError
from lmtrain.eval.task import TaskOptions, find_task
from lmtrain.eval.tasks.wikitext import join_rows, labelled_windows
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from tests.unit.eval.protocols import WIKI


@pytest.mark.wide
def test_counts_of_the_real_file(shared_data: Path) -> None:
    """287,644 tokens are known of the published file, which here has another layout of lines in four places."""
    tokenizer = Tokenizer.load(shared_data / "gpt2-vocab.json")
    prepared = find_task("wikitext/hf-stride512").prepare(
        shared_data / "wiki.test.raw", TaskOptions(tokenizer=tokenizer, seq_len=1024)
    )
    assert prepared.facts.num_tokens == 287_640
    assert prepared.num_targets == sum(request.num_scored for request in prepared.requests) == 287_639
    assert prepared.facts.protocol == "wikitext/hf-stride512"


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (" \n = Mill = \n \n The mill . \n", ["", " = Mill = \n", "", " The mill . \n"]),
        ("one\ntwo", ["one\n", "two\n"]),
        ("one\n\n", ["one\n", ""]),
    ],
)
def test_rows_keep_their_newline_and_blank_ones_are_empty(text: str, rows: list[str]) -> None:
    assert join_rows(text) == "\n\n".join(rows)


def test_windows_and_weights_by_hand() -> None:
    half = [(w.start, w.stop, w.first_scored, weight) for w, weight in labelled_windows(11, 4, 2)]
    assert half == [
        (0, 3, 1, 1.0), (2, 5, 4, 0.5), (4, 7, 6, 0.5), (6, 9, 8, 0.5), (8, 10, 10, 0.0),
    ]  # fmt: skip
    apart = [(w.start, w.stop, w.first_scored, weight) for w, weight in labelled_windows(9, 4, 4)]
    assert apart == [(0, 3, 1, 1.0), (4, 7, 5, 1.0)]  # token 4 has nothing before it, and token 8 a window of its own


@given(st.integers(2, 12), st.data())
def test_each_target_once_and_the_first_of_windows_that_do_not_overlap_never(seq_len: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, seq_len))
    num_tokens = data.draw(st.integers(0, 3 * seq_len + 1))
    scored = [t for w, _ in labelled_windows(num_tokens, seq_len, stride) for t in range(w.first_scored, w.stop + 1)]
    assert scored == [t for t in range(num_tokens) if t % seq_len or (stride < seq_len and t)]


def test_bytes_are_those_of_the_scored_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "wiki"
    original = WIKI + " Characters of 1 to 4 bytes : a \u00e9 \u20ac \U00010330 \n"
    path.write_text(original)
    text = join_rows(original)
    first = len(tokenizer.decode(tokenizer.encode(text)[:1]).encode())
    known = find_task("wikitext/hf-stride8").prepare(path, TaskOptions(tokenizer=tokenizer, seq_len=16)).text_columns
    assert known["bytes"].sum() == len(text.encode()) - first
    assert len(known["bytes"]) == 4


def test_refusals(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "wiki").write_text(WIKI)
    task = find_task("wikitext/hf-stride512")
    with pytest.raises(UsageError, match="Use wikitext/hf-stride8"):
        task.prepare(tmp_path / "wiki", TaskOptions(tokenizer=tokenizer, seq_len=1024, stride=8))
    with pytest.raises(UsageError, match="stride of 512 does not fit seq_len=64"):
        task.prepare(tmp_path / "wiki", TaskOptions(tokenizer=tokenizer, seq_len=64))
    (tmp_path / "blank").write_text(" \n")
    with pytest.raises(DataError, match="holds no word"):
        task.prepare(tmp_path / "blank", TaskOptions(tokenizer=tokenizer, seq_len=1024))
