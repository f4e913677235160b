"""Masked data: any step is read alone, training and validation are disjoint, missing requirements are errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from lmtrain.batch import IGNORED
from lmtrain.data.assemble_training_data import build_training_data, open_datasets
from lmtrain.data.cut_datasets_into_samples import DataRequirements
from lmtrain.data.data_settings import MaskedSettings
from lmtrain.data.samples.masked_language_samples import MaskedDataset
from lmtrain.data.samples.megatron_sample_order import SequentialOrder
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.training_data_by_source import TrainingData
from lmtrain.errors import DataError, SettingsError
from tests.unit.data.conftest import Make
from tests.unit.data.test_training_data import ASKED, SPLIT, Words, load
from tests.unit.data.writing import add_document

MASKED: dict[str, dict[str, Any]] = {
    "own": {},
    "next_sentence": {"pairs": "next_sentence", "mask_share": 0.4, "max_ngram": 2, "whole_word": False},
    "none": {"pairs": "none", "min_sentences": 1, "short_share": 0.5, "max_predictions": 2},
    "later": {"first_sample": 17},
    "megatron": {"order": "megatron"},
    "megatron_later": {"order": "megatron", "first_sample": 17, "megatron_samples": 200},
}


@pytest.fixture
def sentences(tmp_path: Path) -> str:
    chance = np.random.default_rng(1)
    with DatasetWriter(tmp_path / "sentences", np.uint16) as writer:
        for _ in range(40):
            add_document(writer, [chance.integers(6, 206, chance.integers(3, 9)) for _ in range(chance.integers(2, 9))])
        writer.describe(tokenizer=b"{}", fingerprint="abc", vocab_size=206, eod_id=None, num_bytes=42)
    return str(tmp_path / "sentences")


def masked(path: str, asked: DataRequirements | None = None, **values: Any) -> TrainingData:
    settings = MaskedSettings(path=path, split=SPLIT, **values)
    asked = asked or replace(ASKED, seq_len=16, vocab_size=206, tokenizer=Words())
    return build_training_data(settings, open_datasets(settings), asked)


@pytest.mark.parametrize("kind", MASKED)
def test_any_step_of_masked_samples_is_read_alone(sentences: str, kind: str) -> None:
    unbroken = load(masked(sentences, **MASKED[kind]), 0)
    for _, counts, ids, batches in unbroken:
        labels = np.array([batch[1] for batch in batches])
        assert counts == (int((labels != IGNORED).sum()), *([8] if kind != "none" else []))
        assert len(ids) == 8
    for start in (1, 7):
        assert load(masked(sentences, **MASKED[kind]), start) == unbroken[start:]


@pytest.mark.parametrize("kind", MASKED)
def test_masked_training_and_validation_share_no_sentence(sentences: str, kind: str) -> None:
    data = masked(sentences, **MASKED[kind])
    assert isinstance(data.valid[""], MaskedDataset)
    assert isinstance(data.train, MaskedDataset)
    border = 28 if kind.startswith("megatron") else 30  # of documents, as Megatron-LM counts, and of tokens
    assert (data.train.documents, data.valid[""].documents) == (range(border), range(border, 40))
    assert data.valid[""].num_samples > 3
    assert isinstance(data.order, SequentialOrder) == (kind == "megatron")


def test_masked_identities_differ_where_samples_do(sentences: str) -> None:
    texts = {repr(masked(sentences, **values).sample_identity) for values in MASKED.values()}
    assert len(texts) == len(MASKED)
    with pytest.raises(SettingsError, match=r"megatron_samples=100 is less than data\.first_sample=17 plus the 96"):
        masked(sentences, order="megatron", first_sample=17, megatron_samples=100)


def test_masked_samples_need_sentences_and_words(sentences: str, make: Make) -> None:
    with pytest.raises(DataError, match="Preprocess the text again with --split-sentences"):
        masked(str(make("text", [30, 30], described=True).prefix))

    class Bare(Words):
        special: ClassVar[dict[str, int]] = {"eod": 0}

    with pytest.raises(DataError, match=r"no \[CLS\], \[SEP\], \[MASK\], \[PAD\]"):
        masked(sentences, replace(ASKED, seq_len=16, tokenizer=Bare()))
