"""Merging and splitting keep every document; verifying finds every changed byte."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from lmtrain.data.samples.causal_language_samples import CausalDataset
from lmtrain.data.store import merge_split_verify_datasets
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset, dataset_file
from lmtrain.data.store.joined_dataset import UNKNOWN
from lmtrain.errors import DataError, LmtrainError, MissingInputError, OutputError, UsageError
from lmtrain.runtime.processes.fault_injection import Fault, arm
from tests.unit.data.writing import add_document

LENGTHS = [3, 0, 5, 1, 9, 2, 2, 0]


def write(prefix: Path, lengths: list[int], *, dtype: Any = np.uint16, described: str | None = "abc") -> None:
    chance = np.random.default_rng(len(lengths))
    with DatasetWriter(prefix, dtype, overwrite=True) as writer:
        for length in lengths:
            add_document(writer, np.array_split(chance.integers(0, 100, length), 2))
        if described:
            writer.describe(tokenizer=b"{}", fingerprint=described, vocab_size=100, eod_id=7, num_bytes=42)


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset.open(prefix)
    merge_split_verify_datasets.verify(dataset)
    return [dataset.document(d).tolist() for d in range(dataset.num_documents)]


@pytest.mark.parametrize("portion", [1, 4, 1000])
def test_merging_and_splitting_keep_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    monkeypatch.setattr(merge_split_verify_datasets, "_COPIED_TOKENS", portion)
    monkeypatch.setattr(merge_split_verify_datasets, "_COPIED_DOCUMENTS", portion)
    write(tmp_path / "a", LENGTHS)
    write(tmp_path / "b", [4, 0, 6])
    merge_split_verify_datasets.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    together = documents(tmp_path / "a") + documents(tmp_path / "b")
    assert documents(tmp_path / "both") == together
    info = IndexedDataset.open(tmp_path / "both").info
    assert info is not None
    assert (info.num_bytes, info.tokenizer_fingerprint, info.eod_id, info.vocab_size) == (84, "abc", 7, 100)
    assert dataset_file(tmp_path / "both", ".tokenizer.json").read_bytes() == b"{}"
    outputs = [tmp_path / name for name in ("x", "y", "z")]
    merge_split_verify_datasets.split(tmp_path / "both", (5, 3, 3), outputs)
    assert [len(documents(output)) for output in outputs] == [5, 3, 3]
    assert [document for output in outputs for document in documents(output)] == together
    sequences = [IndexedDataset.open(prefix).lengths.tolist() for prefix in (*outputs, tmp_path / "both")]
    assert [n for lengths in sequences[:3] for n in lengths] == sequences[3]
    divided = IndexedDataset.open(tmp_path / "x").info
    assert divided is not None
    assert divided.num_bytes == UNKNOWN


def test_unknown_text_bytes_stay_unknown_after_merging(tmp_path: Path) -> None:
    write(tmp_path / "a", LENGTHS)
    merge_split_verify_datasets.split(tmp_path / "a", (1, 1), [tmp_path / "x", tmp_path / "y"])  # unknown text bytes
    merge_split_verify_datasets.merge([tmp_path / name for name in ("x", "a", "y")], tmp_path / "all")
    info = IndexedDataset.open(tmp_path / "all").info
    assert info is not None
    assert info.num_bytes == UNKNOWN


def test_datasets_with_different_dtypes_or_tokenizers_are_not_merged(tmp_path: Path) -> None:
    write(tmp_path / "a", [3])
    kinds: list[tuple[str, dict[str, Any], str]] = [
        ("wide", {"dtype": np.int32}, "dtype uint16, but .*wide has int32"),
        ("other", {"described": "xyz"}, "tokenizer abc, but .*other has xyz"),
        ("foreign", {"described": None}, "foreign has no sidecar"),
    ]
    for name, kwargs, says in kinds:
        write(tmp_path / name, [3], **kwargs)
        with pytest.raises(DataError, match=says):
            merge_split_verify_datasets.merge([tmp_path / "a", tmp_path / name], tmp_path / "both")
        assert not dataset_file(tmp_path / "both", ".idx").exists()


def test_datasets_of_other_tools_merge_without_a_sidecar(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [3, 2], described=None)
    merge_split_verify_datasets.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert IndexedDataset.open(tmp_path / "both").info is None


def test_a_dataset_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    write(tmp_path / "a", [3, 4])
    write(tmp_path / "b", [1])
    with pytest.raises(OutputError, match="--overwrite"):
        merge_split_verify_datasets.merge([tmp_path / "a", tmp_path / "a"], tmp_path / "b")
    assert len(documents(tmp_path / "b")) == 1
    both = [tmp_path / "a", tmp_path / "a"]
    assert merge_split_verify_datasets.merge(both, tmp_path / "b", overwrite=True)
    assert len(documents(tmp_path / "b")) == 4
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    assert not merge_split_verify_datasets.merge(both, tmp_path / "b")
    with pytest.raises(UsageError, match="is one of the datasets to join"):  # a kill would leave no input
        merge_split_verify_datasets.merge(both, tmp_path / "a", overwrite=True)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("count", range(1, 6))
def test_a_merge_that_was_killed_while_files_are_renamed_is_completed(tmp_path: Path, count: int) -> None:
    """Without --overwrite, as it was typed; meanwhile no verb takes what is there for a dataset."""
    write(tmp_path / "a", [3, 4])
    arm(Fault("exc", "data.publish", count))
    with pytest.raises(RuntimeError, match="fault at"), patch_rmtree():
        merge_split_verify_datasets.merge([tmp_path / "a", tmp_path / "a"], tmp_path / "b")
    with pytest.raises(MissingInputError, match=r"b\.idx"):
        IndexedDataset.open(tmp_path / "b")
    assert merge_split_verify_datasets.merge([tmp_path / "a", tmp_path / "a"], tmp_path / "b")
    assert documents(tmp_path / "b") == 2 * documents(tmp_path / "a")
    assert not list(tmp_path.glob(".*"))


def test_no_part_of_a_split_is_written_if_one_of_them_cannot_be(tmp_path: Path) -> None:
    write(tmp_path / "a", [3, 4])
    write(tmp_path / "two", [1])
    outputs = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(OutputError, match=r"two\.\w+ is there already"):
        merge_split_verify_datasets.split(tmp_path / "a", [1, 1], outputs)
    assert not (tmp_path / "one.idx").exists()
    assert merge_split_verify_datasets.split(tmp_path / "a", [1, 1], outputs, overwrite=True)
    for path in tmp_path.glob("two.*"):
        path.unlink()
    made = (tmp_path / "one.idx").stat().st_mtime_ns
    assert merge_split_verify_datasets.split(tmp_path / "a", [1, 1], outputs)  # the second is missing
    assert (tmp_path / "one.idx").stat().st_mtime_ns == made
    assert not merge_split_verify_datasets.split(tmp_path / "a", [1, 1], outputs)


def patch_rmtree() -> Any:
    """Keep the files of the working folder, as a kill does."""
    return patch("lmtrain.data.store.dataset_writer.shutil.rmtree")


@pytest.mark.parametrize(
    ("shares", "names", "says"),
    [
        ((1.0,), ["x"], "two or three shares"),
        ((1, 1), ["x"], "--shares has 2 entries, and --output was given 1 times"),
        ((1, 1), ["x", "x"], "the same path"),
        ((1, 0), ["x", "y"], "above 0"),
        ((1, float("nan")), ["x", "y"], "above 0"),
        ((1000, 1), ["x", "y"], "y would get no document: .*a has only"),
    ],
)
def test_wrong_splits(tmp_path: Path, shares: tuple[float, ...], names: list[str], says: str) -> None:
    write(tmp_path / "a", LENGTHS)
    with pytest.raises(UsageError, match=says):
        merge_split_verify_datasets.split(tmp_path / "a", shares, [tmp_path / name for name in names])


@pytest.mark.parametrize("copying", ["merge", "split"])
def test_damage_is_not_copied_from_a_dataset_that_is_older_than_blocks(tmp_path: Path, copying: str) -> None:
    """Only the checksum of the whole file in its sidecar can tell."""
    write(tmp_path / "a", LENGTHS)
    write(tmp_path / "b", [4, 0, 6])
    sidecar = tmp_path / "a.json"
    newer = ("blocks_sha256", "tokenizer_sha256", "made_from", "sidecar_sha256")
    sidecar.write_text(json.dumps({k: v for k, v in json.loads(sidecar.read_text()).items() if k not in newer}))
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[4] ^= 1  # another id of the vocabulary
    (tmp_path / "a.bin").write_bytes(data)
    arguments: dict[str, tuple[Any, ...]] = {
        "merge": ([tmp_path / "b", tmp_path / "a"], tmp_path / "both"),
        "split": (tmp_path / "a", (5, 3), [tmp_path / "x", tmp_path / "y"]),
    }
    with pytest.raises(DataError, match="checksum"):
        getattr(merge_split_verify_datasets, copying)(*arguments[copying])
    assert not [path.name for path in tmp_path.iterdir() if path.name[0] in "xy" or path.name.startswith("both")]


def test_verifying_says_the_checksum(tmp_path: Path) -> None:
    write(tmp_path / "a", LENGTHS)
    info = IndexedDataset.open(tmp_path / "a").info
    assert info is not None
    facts = merge_split_verify_datasets.verify(IndexedDataset.open(tmp_path / "a"))
    assert facts == {
        "content_sha256": info.content_sha256, "max_id": info.max_id, "compared_with_sidecar": True,
        "sidecar_has_hash": True, "compared_with_record": False,
    }  # fmt: skip
    dataset_file(tmp_path / "a", ".json").unlink()
    facts = merge_split_verify_datasets.verify(IndexedDataset.open(tmp_path / "a"))
    assert (facts["content_sha256"], facts["compared_with_sidecar"]) == (info.content_sha256, False)


def test_lengths_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "a", LENGTHS)
    counts, facts = merge_split_verify_datasets.length_histogram(IndexedDataset.open(tmp_path / "a"))
    assert counts.tolist() == [2, 1, 3, 1, 1]  # 0, 1, 2-3, 4-7, 8-15
    assert facts == {
        "documents": 8, "tokens": 22, "empty_documents": 2, "longest_document": 9, "mean_length": 2.75
    }  # fmt: skip
    write(tmp_path / "b", [])
    assert merge_split_verify_datasets.length_histogram(IndexedDataset.open(tmp_path / "b"))[0].tolist() == [0]


def mutate_and_open(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Damage one of the files again and again: an error of ours, or (without a checksum) the bytes as they are."""
    chance = random.Random(seed)
    found = harmless = 0
    for described in (True, False):
        write(folder / "a", LENGTHS, described="abc" if described else None)
        whole = {suffix: dataset_file(folder / "a", suffix).read_bytes() for suffix in (".bin", ".idx")}
        for _ in range(times // 2):
            suffix = chance.choice([".bin", ".idx", ".idx", ".idx"])
            mutated = mutate(bytearray(whole[suffix]), chance)
            if mutated == whole[suffix]:
                continue
            dataset_file(folder / "a", suffix).write_bytes(mutated)
            try:
                dataset = IndexedDataset.open(folder / "a")
                merge_split_verify_datasets.verify(dataset)
                read_all(dataset)
            except LmtrainError:
                found += 1
            else:
                assert not described, f"{suffix} passed for whole: {mutated.hex()}"
                # Without a checksum, other ids and other borders between documents are a dataset like any other.
                assert dataset.num_tokens * 2 == len(dataset_file(folder / "a", ".bin").read_bytes())
                harmless += 1
            dataset_file(folder / "a", suffix).write_bytes(whole[suffix])
    return found, harmless


def mutate(data: bytearray, chance: random.Random) -> bytes:
    kind, at = chance.randrange(6), chance.randrange(len(data))
    if kind == 0:
        del data[at:]
    elif kind == 1:
        data[at:at] = chance.randbytes(chance.randint(1, 12))
    elif kind == 2:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 3:  # a number set to something extreme
        size = chance.choice([4, 8])
        at = (at // 4 * 4 + 2) % max(len(data) - size, 1)
        extreme = chance.choice([0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**60])
        data[at : at + size] = (extreme % 2 ** (8 * size)).to_bytes(size, "little")
    elif kind == 4:
        other = chance.randrange(len(data))
        data[at : at + 8], data[other : other + 8] = data[other : other + 8], data[at : at + 8]
    else:
        data[at : at + 8] = chance.randbytes(len(data[at : at + 8]))
    return bytes(data)


def read_all(dataset: IndexedDataset) -> None:
    """Whatever passes for whole can also be read to its end."""
    for document in range(dataset.num_documents):
        dataset.document(document)
    if dataset.num_tokens > 4:
        made = CausalDataset(dataset, range(dataset.num_documents), 2, document_mask=True)
        made.batch(np.arange(made.num_samples))


def test_many_damaged_datasets(tmp_path: Path) -> None:
    found, harmless = mutate_and_open(tmp_path, 160, seed=0)
    assert found > 100
    assert harmless < 48


@pytest.mark.slow
def test_ten_thousand_damaged_datasets(tmp_path: Path) -> None:
    found, harmless = mutate_and_open(tmp_path, 10_000, seed=1)
    assert found + harmless > 9_500


@pytest.mark.parametrize(("shares", "names"), [
    ((98, 2), "train valid"), ((10, 90), "valid train"), ((1, 1), "train valid"), ((5, 5, 90), "valid test train"),
    ((1, 98, 1), "valid train test"),
])  # fmt: skip
def test_the_largest_part_is_advised_to_be_called_train(tmp_path: Path, shares: tuple[int, ...], names: str) -> None:
    words = " ".join(f"--output {tmp_path}/a_{name}" for name in names.split())
    with pytest.raises(UsageError, match=re.escape(f"as in {words}.")):
        merge_split_verify_datasets.check_outputs(tmp_path / "a", shares, [])
