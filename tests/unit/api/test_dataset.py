"""A dataset is a list of documents: numbers and slices, texts, and refusals that name what is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lmtrain
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.errors import DataError, MissingInputError
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer
from lmtrain.tokenizer.train import train_bpe
from tests.unit.data.writing import add_document

TEXTS = ["The old mill", "stood by", "", "the river"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 280)


@pytest.fixture
def dataset(tmp_path: Path, tokenizer: Tokenizer) -> lmtrain.Dataset:
    """Documents that end with the end-of-document token, but for the last; the first is of two sequences."""
    eod = [tokenizer.eod_id]
    ids = [[tokenizer.encode(text)] for text in TEXTS]
    with DatasetWriter(tmp_path / "some.data", np.uint16) as writer:
        for number, sequences in enumerate(ids):
            ended = [*sequences[0], *(eod if number < 3 else [])]
            parts = [ended[:2], ended[2:]] if number == 0 else [ended]
            add_document(writer, [np.array(part) for part in parts])
        writer.describe(
            tokenizer=tokenizer.to_bytes(), fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id, num_bytes=40,
        )  # fmt: skip
    return lmtrain.open_dataset(tmp_path / "some.data")


def test_documents_by_number_slice_and_turn(dataset: lmtrain.Dataset, tokenizer: Tokenizer) -> None:
    expected = [[*tokenizer.encode(text), *([tokenizer.eod_id] if text != TEXTS[-1] else [])] for text in TEXTS]
    assert len(dataset) == 4
    assert [each.tolist() for each in dataset] == expected
    assert [dataset[number].tolist() for number in range(-4, 4)] == expected * 2
    assert [each.tolist() for each in dataset[::-2]] == expected[::-2]
    assert dataset[np.int64(1)].dtype == np.uint16
    assert dataset.num_tokens == sum(map(len, expected))
    dataset[0][0] = 0  # a copy
    assert dataset[0].tolist() == expected[0]


def test_a_notebook_shows_what_it_is(dataset: lmtrain.Dataset) -> None:
    num_documents, num_tokens = len(TEXTS), sum(len(dataset[i]) for i in range(len(TEXTS)))
    assert repr(dataset) == f"<lmtrain.Dataset {dataset.prefix} of {num_documents} documents, {num_tokens} tokens>"
    assert repr(dataset.tokenizer) == f"<lmtrain.Tokenizer BPE with {dataset.tokenizer.vocab_size} tokens>"


def test_texts_come_back(dataset: lmtrain.Dataset) -> None:
    assert [dataset.decode(number) for number in (0, 1, 2, -1)] == TEXTS
    assert dataset.tokenizer.decode(dataset[1]) == f"{TEXTS[1]}<|endoftext|>"


@pytest.mark.parametrize("number", [4, -5])
def test_a_number_outside_is_an_index_error(dataset: lmtrain.Dataset, number: int) -> None:
    for read in (dataset.__getitem__, dataset.decode):
        with pytest.raises(IndexError, match=f"has 4 documents, and none has the number {number}"):
            read(number)


def test_a_dataset_without_its_tokenizer_or_with_another(dataset: lmtrain.Dataset) -> None:
    stored = dataset.prefix.with_name("some.data.tokenizer.json")
    Tokenizer(train_bpe(["other texts"], 270)._inner).save(stored)
    with pytest.raises(DataError, match=r"is not the tokenizer that .* was written with"):
        dataset.decode(0)
    stored.unlink()
    with pytest.raises(MissingInputError, match="was stored without its tokenizer"):
        dataset.decode(0)
    assert len(dataset[0]) > 0
    with pytest.raises(MissingInputError, match="Did you mean"):
        lmtrain.open_dataset(dataset.prefix.with_name("some.date"))


def test_damage_is_found_when_it_is_read(dataset: lmtrain.Dataset) -> None:
    file = dataset.prefix.with_name("some.data.bin")
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError):
        lmtrain.open_dataset(dataset.prefix)[0]
