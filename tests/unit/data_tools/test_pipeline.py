"""Preprocessing gives the same files whatever the number of workers, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_tools.pipeline import preprocess
from lmtrain.data.format import DatasetWriter, IndexedDataset, dtype_for
from lmtrain.errors import DataError, OutputError, UsageError
from lmtrain.tokenizer.base import Tokenizer
from lmtrain.tokenizer.train import train_bpe, train_wordpiece

TEXTS = [f"document {i} says: the cat's {i % 5} mats — naïve\u2028\n" * (i % 7) for i in range(60)]
TOKENIZER = train_bpe(TEXTS, 300)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in TEXTS[:50]))
    for number, text in enumerate(TEXTS[50:]):
        (folder / f"b{number}.txt").write_text(text)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_number_of_workers_does_not_matter(corpus: Path, tmp_path: Path) -> None:
    made = []
    for workers in (1, 2, 3):
        output = tmp_path / str(workers) / "data"
        summary = preprocess([corpus], TOKENIZER, output, workers=workers, slice_bytes=700)
        assert (summary.num_documents, summary.files[0]) == (60, str(output) + ".bin")
        made.append(files(output.parent))
    assert made[0] == made[1] == made[2]
    assert sorted(made[0]) == ["data.bin", "data.idx", "data.json", "data.tokenizer.json"]


def test_what_is_written(corpus: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    summary = preprocess(
        [corpus], TOKENIZER, tmp_path / "out", slice_bytes=900, progress=lambda done, total: calls.append((done, total))
    )
    dataset = IndexedDataset.open(tmp_path / "out")
    dataset.verify()
    documents = [dataset.document(d).tolist() for d in range(dataset.num_documents)]
    assert TOKENIZER.eod_id == 0
    assert documents == [ids + [0] * bool(ids) for ids in TOKENIZER.encode_batch(TEXTS)]
    assert dataset.info is not None
    assert dataset.info.tokenizer_fingerprint == TOKENIZER.fingerprint
    assert dataset.info.num_bytes == summary.num_bytes == sum(len(text.encode()) for text in TEXTS)
    assert Tokenizer.load(tmp_path / "out.tokenizer.json").fingerprint == TOKENIZER.fingerprint
    total = sum(path.stat().st_size for path in corpus.iterdir())
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_ends_of_documents(corpus: Path, tmp_path: Path) -> None:
    preprocess([corpus], TOKENIZER, tmp_path / "bare", append_eod=False)
    assert TOKENIZER.eod_id not in IndexedDataset.open(tmp_path / "bare").tokens.tolist()
    wordpiece = train_wordpiece(TEXTS, 100, lowercase=True)
    preprocess([corpus], wordpiece, tmp_path / "words")
    assert IndexedDataset.open(tmp_path / "words").document(1).tolist() == wordpiece.encode(TEXTS[1])
    with pytest.raises(UsageError, match="--no-append-eod"):
        preprocess([corpus], wordpiece, tmp_path / "none", append_eod=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_leaves_nothing(corpus: Path, tmp_path: Path, workers: int) -> None:
    with (corpus / "a.jsonl").open("a") as file:
        file.write('{"text": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:51 \(byte \d+\): the value of 'text' is not text"):
        preprocess([corpus], TOKENIZER, tmp_path / "out" / "data", workers=workers, slice_bytes=700)
    assert files(tmp_path / "out") == {}


def test_the_output_is_guarded(corpus: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "out", dtype_for(300)) as writer:
        with pytest.raises(OutputError, match="in use") as caught:
            preprocess([corpus], TOKENIZER, tmp_path / "out")
        assert caught.value.exit_code == 73
        writer.add_document([])
    with pytest.raises(OutputError, match="--overwrite"):
        preprocess([corpus], TOKENIZER, tmp_path / "out")
    preprocess([corpus], TOKENIZER, tmp_path / "out", overwrite=True)
    assert IndexedDataset.open(tmp_path / "out").num_documents == 60


def test_no_text_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="hold no text"):
        preprocess([tmp_path / "a.txt"], TOKENIZER, tmp_path / "out")
    with pytest.raises(UsageError, match="--workers=0"):
        preprocess([tmp_path / "a.txt"], TOKENIZER, tmp_path / "out", workers=0)
