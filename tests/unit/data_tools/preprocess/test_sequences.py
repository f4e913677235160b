"""Documents become one sequence, or one per sentence, with the end-of-document token in the last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_tools.preprocess.preprocess_pipeline import Options, preprocess
from data_tools.read.cut_files_into_chunks import SizeLimits
from data_tools.read.parse_chunks_and_bad_lines import OnError
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.data.store.merge_split_verify_datasets import verify
from lmtrain.tokenizer.train import train_bpe, train_wordpiece
from tests.marks import wide
from tests.unit.data.writing import read_sequence

TEXTS = ["One sentence. And another one!\nA third", "", "  \n", "Alone.", "It is 5 p.m. now. Dr. Who waits."]
SENTENCES = [
    ["One sentence.", "And another one!", "A third"],
    [],
    [],
    ["Alone."],
    ["It is 5 p.m. now.", "Dr. Who waits."],
]
BPE = train_bpe(TEXTS, 300)


@pytest.mark.parametrize(
    ("append_eod", "workers", "slice_bytes"),
    [(True, 2, 40), (False, 1, 40), (True, 1, 1 << 20), *wide((False, 2, 1 << 20))],
)
def test_each_sentence_is_a_sequence(tmp_path: Path, append_eod: bool, workers: int, slice_bytes: int) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:2], "nonsense", *lines[2:]]))
    options = Options(
        split_sentences=True, lines_end_sentences=True, append_eod=append_eod, workers=workers,
        limits=SizeLimits(slice_bytes), on_error=OnError.SKIP,
    )  # fmt: skip
    summary = preprocess([tmp_path / "a.jsonl"], BPE, tmp_path / "out", options)
    dataset = IndexedDataset.open(tmp_path / "out")
    verify(dataset)
    found = [
        [read_sequence(dataset, i) for i in range(dataset.document_index[d], dataset.document_index[d + 1])]
        for d in range(dataset.num_documents)
    ]
    wanted = [BPE.encode_batch(sentences) for sentences in SENTENCES]
    for document in wanted:
        if document and append_eod:
            document[-1] = [*document[-1], 0]
    assert found == wanted
    assert summary.num_bytes == sum(len(text) for text in TEXTS)
    assert summary.rejects == {"not valid JSON": 1}


def test_sentences_without_ids_are_none(tmp_path: Path) -> None:
    """WordPiece has nothing for a stretch of control characters, which still is a sentence."""
    (tmp_path / "a.txt").write_text("A cat sat. \u200b\u200b. It slept.")
    words = train_wordpiece(["a cat sat. it slept. \u200b"], 60, lowercase=True)
    preprocess([tmp_path / "a.txt"], words, tmp_path / "out", Options(split_sentences=True))
    dataset = IndexedDataset.open(tmp_path / "out")
    verify(dataset)
    assert dataset.num_documents == 1
    assert min(dataset.lengths) > 0
