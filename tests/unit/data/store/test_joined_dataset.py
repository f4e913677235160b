"""Shards read as one dataset: all that is read of them is what the merged dataset has, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.data.assemble_training_data import build_training_data, open_datasets
from lmtrain.data.data_settings import DataSettings, MaskedSettings
from lmtrain.data.store import joined_dataset
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset, dataset_file
from lmtrain.data.store.joined_dataset import JoinedDataset, dataset_exists, open_dataset
from lmtrain.data.store.merge_split_verify_datasets import merge, verify
from lmtrain.errors import DataError, MissingInputError
from tests.unit.data.test_masked_training_data import MASKED
from tests.unit.data.test_training_data import ASKED, KINDS, SPLIT, Words, load
from tests.unit.data.writing import add_document


def write_shards(folder: Path, described: bool = True, dtype: Any = np.uint16) -> tuple[Path, Path]:
    """Write three shards of a dataset and the dataset that merges them; return the two paths."""
    chance = np.random.default_rng(1)
    shards = [folder / f"books-{number:05d}" for number in range(3)]
    for number, shard in enumerate(shards):
        with DatasetWriter(shard, dtype) as writer:
            for _ in range((14, 1, 25)[number]):
                sizes = chance.integers(3, 9, chance.integers(2, 9))
                add_document(writer, [chance.integers(6, 206, size) for size in sizes])
            if described:
                writer.describe(tokenizer=b"{}", fingerprint="abc", vocab_size=206, eod_id=None, num_bytes=42)
    merge(shards, folder / "merged")
    return folder / "books", folder / "merged"


@pytest.mark.parametrize("described", [True, False])
def test_content_and_digest_are_those_of_the_merged_dataset(tmp_path: Path, described: bool) -> None:
    joined, merged = map(open_dataset, write_shards(tmp_path, described))
    assert isinstance(joined, JoinedDataset)
    assert not isinstance(merged, JoinedDataset)
    assert b"".join(joined.index_bytes()) == dataset_file(merged.prefix, ".idx").read_bytes()
    assert joined.tokens[:].tobytes() == dataset_file(merged.prefix, ".bin").read_bytes()
    assert (joined.content_digest, joined.index_crc) == (merged.content_digest, merged.index_crc)
    if merged.info is None:
        assert joined.info is None
    else:
        files: dict[str, Any] = {"blocks_sha256": None, "tokenizer_sha256": None, "sidecar_sha256": None}
        files["made_from"] = None
        assert joined.info is not None
        assert replace(joined.info, **files) == replace(merged.info, **files)
    ours, theirs = verify(joined), verify(merged)
    assert ours["content_sha256"] == theirs["content_sha256"]
    merge([joined.prefix], tmp_path / "again")
    assert dataset_file(tmp_path / "again", ".bin").read_bytes() == dataset_file(merged.prefix, ".bin").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_merged_dataset(tmp_path: Path, kind: str) -> None:
    results = []
    for prefix in write_shards(tmp_path):
        settings = DataSettings(path=str(prefix), split=SPLIT, **KINDS[kind])
        data = build_training_data(settings, open_datasets(settings), ASKED)
        results.append((load(data, 0), load(data, 7), data.sample_identity, data.content_sha256, data.history))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["own", "next_sentence", "megatron"])
def test_masked_samples_are_those_of_the_merged_dataset(tmp_path: Path, kind: str) -> None:
    results, asked = [], replace(ASKED, seq_len=16, vocab_size=206, tokenizer=Words())
    for prefix in write_shards(tmp_path):
        settings = MaskedSettings(path=str(prefix), split=SPLIT, **MASKED[kind])
        data = build_training_data(settings, open_datasets(settings), asked)
        results.append((load(data, 0), data.sample_identity, data.content_sha256))
    assert results[0] == results[1]


def test_the_index_in_a_file_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, merged = write_shards(tmp_path)
    monkeypatch.setattr(joined_dataset, "_CACHED_FROM", 1)
    for _ in range(2):
        assert b"".join(open_dataset(prefix).index_bytes()) == dataset_file(merged, ".idx").read_bytes()
    assert [path.name.partition("-")[0] for path in (tmp_path / "books.index").iterdir() if path.is_dir()] == ["joined"]


def test_the_digest_is_computed_once_and_again_for_another_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, _ = write_shards(tmp_path)
    digest = open_dataset(prefix).content_digest
    hashed = JoinedDataset._hash_content
    monkeypatch.setattr(JoinedDataset, "_hash_content", lambda self: pytest.fail("read again"))
    assert open_dataset(prefix).content_digest == digest
    monkeypatch.setattr(JoinedDataset, "_hash_content", hashed)
    for suffix in (".bin", ".idx", ".json", ".blocks", ".tokenizer.json"):
        dataset_file(tmp_path / "books-00002", suffix).unlink()
    assert open_dataset(prefix).content_digest != digest


def test_damage_of_a_shard_is_found(tmp_path: Path) -> None:
    prefix, _ = write_shards(tmp_path)
    content = bytearray((tmp_path / "books-00001.bin").read_bytes())
    content[-2] ^= 1
    (tmp_path / "books-00001.bin").write_bytes(content)
    joined = open_dataset(prefix)
    first = joined.shards[0].num_tokens
    assert len(joined.read(0, first)) == first
    with pytest.raises(DataError, match=r"books-00001\.bin is damaged"):
        joined.read(first - 2, first + 2)
    with pytest.raises(DataError, match=r"books-00001\.bin is damaged"):
        joined.check_all()


def test_a_missing_number_is_named(tmp_path: Path) -> None:
    prefix, _ = write_shards(tmp_path)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"books-00001{suffix}").unlink()
    with pytest.raises(MissingInputError, match=r"books-00001\.idx is missing, though .*books has shards up to"):
        open_dataset(prefix)


def test_shards_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    prefix, _ = write_shards(tmp_path)
    with DatasetWriter(tmp_path / "books-00003", np.uint16) as writer:
        add_document(writer, [np.arange(5)])
        writer.describe(tokenizer=b"{}", fingerprint="another", vocab_size=206, eod_id=None, num_bytes=42)
    with pytest.raises(DataError, match="has the tokenizer abc, but"):
        open_dataset(prefix)


def test_the_path_itself_goes_first(tmp_path: Path) -> None:
    prefix, merged = write_shards(tmp_path)
    assert dataset_exists(prefix)
    merge([tmp_path / "books-00002"], prefix)
    assert open_dataset(prefix).num_documents == IndexedDataset.open(tmp_path / "books-00002").num_documents
    assert not dataset_exists(tmp_path / "book")
    assert open_dataset(str(merged) + ".bin").prefix == merged
