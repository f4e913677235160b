"""A portion's documents become ids end to end: long texts in parts, ends where asked, empty documents empty."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from data_tools.encode import Encoder
from data_tools.sources import cut, find_sources
from lmtrain.tokenizer.train import train_bpe

TEXTS = ["the cat sat on the mat " * 40, "", "x", " ", "dogs and cats and dogs"]
TOKENIZER = train_bpe(TEXTS, 280)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    return tmp_path


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("part_chars", [1, 50, 1 << 20])
def test_ids_and_lengths(folder: Path, append_eod: bool, part_chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.tokenizer.base._LONG", part_chars)
    (portion,) = cut(find_sources([folder]))
    encoded = Encoder(TOKENIZER, "body", append_eod).encode(portion)
    expected = [ids + [0] * (append_eod and bool(ids)) for ids in TOKENIZER.encode_batch(TEXTS)]
    assert encoded.tokens.tolist() == list(chain.from_iterable(expected))
    assert encoded.lengths.tolist() == [len(ids) for ids in expected]
    assert encoded.num_text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert encoded.num_source_bytes == (folder / "a.jsonl").stat().st_size
    assert encoded.tokens.dtype.name == "uint16"
