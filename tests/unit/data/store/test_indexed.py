"""The .bin/.idx format byte for byte; damage is always found and never crashes; files appear only when complete."""

from __future__ import annotations

import json
import os
import random
import struct
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.store import dataset_writer as dataset_writer
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset, hash_without
from lmtrain.data.store.merge_split_verify_datasets import verify
from lmtrain.errors import DataError, LmtrainError, MissingInputError, OutputError
from lmtrain.runtime.files.unreadable_files import explain_unreadable
from lmtrain.tokenizer.bulk_encoding import dtype_for
from tests.unit.data.writing import add_document, read_sequence

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8]]


def write(prefix: Path, documents: list[list[list[int]]], *, described: bool = False) -> None:
    with DatasetWriter(prefix, np.uint16, overwrite=True) as writer:
        for document in documents:
            add_document(writer, [np.array(sequence) for sequence in document])
        if described:
            writer.describe(tokenizer=b"{}", fingerprint="abc", vocab_size=100, eod_id=None, num_bytes=42)


def content(dataset: IndexedDataset) -> tuple[list[list[int]], list[list[int]]]:
    documents = [dataset.document(d).tolist() for d in range(dataset.num_documents)]
    return documents, [read_sequence(dataset, i) for i in range(dataset.num_sequences)]


def test_bytes_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "a", [[d] for d in DOCUMENTS])
    assert (tmp_path / "a.bin").read_bytes().hex() == "01000200030004000500060007000800"
    assert (tmp_path / "a.idx").read_bytes().hex() == (
        "4d4d49444944580000" "0100000000000000" "08" "0300000000000000" "0400000000000000"
        "030000000100000004000000" "000000000000000006000000000000000800000000000000"
        "0000000000000000010000000000000002000000000000000300000000000000"
    )  # fmt: skip


@pytest.mark.parametrize("at_once", [16, 4 << 20])
def test_empty_documents_and_documents_of_many_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(
        dataset_writer, "_READ_BYTES", at_once
    )  # of what has grown on disk, when the index is made of it
    write(tmp_path / "a", [[], [[1, 2], [3]], [[], [4]], [[]], []])
    dataset = IndexedDataset.open(tmp_path / "a")
    assert dataset.document_index.tolist() == [0, 0, 2, 3, 3, 3]
    assert content(dataset) == ([[], [1, 2, 3], [4], [], []], [[1, 2], [3], [4]])
    verify(dataset)


def test_a_dataset_without_tokens_is_valid(tmp_path: Path) -> None:
    for num in (0, 1):
        documents: list[list[list[int]]] = [[]] * num
        write(tmp_path / "a", documents, described=True)
        dataset = IndexedDataset.open(tmp_path / "a")
        verify(dataset)
        assert (dataset.num_documents, dataset.num_tokens) == (num, 0)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=4), max_size=3), max_size=6))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]) -> None:
    prefix = tmp_path_factory.mktemp("data") / "a.b"
    write(prefix, documents)
    flat, sequences = content(IndexedDataset.open(prefix))
    assert flat == [[token for sequence in document for token in sequence] for document in documents]
    assert sequences == [sequence for document in documents for sequence in document if sequence]


def test_dtypes_follow_the_vocabulary(tmp_path: Path) -> None:
    assert dtype_for(65499) == np.uint16
    assert dtype_for(65500) == np.int32
    with DatasetWriter(tmp_path / "a", np.int32) as writer:
        add_document(writer, [np.array([70000])])
    dataset = IndexedDataset.open(tmp_path / "a.bin")
    assert (dataset.dtype.name, dataset.tokens.tolist(), dataset.info) == ("int32", [70000], None)
    with pytest.raises(DataError, match="70000 does not fit"), DatasetWriter(tmp_path / "b", np.uint16) as writer:
        add_document(writer, [np.array([70000])])
    with pytest.raises(DataError, match="cannot hold ids of dtype float32"), DatasetWriter(tmp_path / "c", np.float32):
        pass
    assert not (tmp_path / ".c.tmp").exists()


def test_the_sidecar_says_what_is_inside(tmp_path: Path) -> None:
    write(tmp_path / "a", [[d] for d in DOCUMENTS], described=True)
    info = IndexedDataset.open(tmp_path / "a").info
    assert info is not None
    assert (info.num_documents, info.num_tokens, info.max_id, info.num_bytes) == (3, 8, 8, 42)
    assert (info.tokenizer_fingerprint, info.vocab_size, info.eod_id, info.dtype) == ("abc", 100, None, "uint16")
    assert (tmp_path / "a.tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_tokens": 9}, "num_tokens=9"),
        ({"dtype": "int16"}, "dtype=int16"),
        ({"version": 2}, "version=2"),
        ({"format": "other"}, "does not describe a dataset"),
        ({"max_id": "8"}, "max_id='8'"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"eod_id": []}, "eod_id"),
        ({"eod_id": 100}, "eod_id=100 is outside vocab_size=100"),
        ({"max_id": 100}, "max_id=100 is outside"),
    ],
)
def test_a_sidecar_that_does_not_fit(tmp_path: Path, change: dict[str, object], says: str) -> None:
    write(tmp_path / "a", [[d] for d in DOCUMENTS], described=True)
    sidecar = tmp_path / "a.json"
    tree = json.loads(sidecar.read_text()) | change
    sidecar.write_text(json.dumps(tree | {"sidecar_sha256": hash_without(tree)}))
    with pytest.raises(DataError, match=says):
        IndexedDataset.open(tmp_path / "a")


def test_any_letter_of_the_sidecar_that_changes_is_found(tmp_path: Path) -> None:
    write(tmp_path / "a", [[d] for d in DOCUMENTS], described=True)
    sidecar, chance = tmp_path / "a.json", random.Random(0)
    whole = sidecar.read_bytes()
    for at in chance.sample(range(len(whole)), 150):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chance.randrange(8)
        sidecar.write_bytes(damaged)
        with suppress(LmtrainError):
            IndexedDataset.open(tmp_path / "a")
            assert json.loads(damaged) == json.loads(whole)  # blanks that became other blanks


def test_a_sidecar_from_before_it_had_a_hash(tmp_path: Path) -> None:
    write(tmp_path / "a", [[d] for d in DOCUMENTS], described=True)
    sidecar = tmp_path / "a.json"
    newer = ("blocks_sha256", "tokenizer_sha256", "made_from", "sidecar_sha256")
    old = {k: v for k, v in json.loads(sidecar.read_text()).items() if k not in newer}
    sidecar.write_text(json.dumps(old))
    assert verify(IndexedDataset.open(tmp_path / "a"))["sidecar_has_hash"] is False
    (tmp_path / "a.bin").write_bytes(b"\x02" + (tmp_path / "a.bin").read_bytes()[1:])
    with pytest.raises(DataError, match="checksum"):
        verify(IndexedDataset.open(tmp_path / "a"))
    sidecar.write_text(json.dumps({k: v for k, v in old.items() if k != "eod_id"}))
    with pytest.raises(DataError, match="has no key eod_id"):
        IndexedDataset.open(tmp_path / "a")


@pytest.mark.parametrize("suffix", [".idx", ".bin", ".json"])
def test_an_input_that_is_not_a_regular_file_is_refused_at_once(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "a", [[d] for d in DOCUMENTS], described=True)
    (tmp_path / f"a{suffix}").unlink()
    os.mkfifo(tmp_path / f"a{suffix}")
    with pytest.raises(DataError, match=r"is not a plain file|has 0 bytes"):
        IndexedDataset.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("offset", "new", "says"),
    [
        (0, b"X", "offset 0: the file does not begin"),
        (9, b"\x02", "offset 9: the file has version 2"),
        (17, b"\x06", "offset 17: the dtype code 6"),
        (17, b"\x04", "a.bin has 16 bytes"),
        (18, b"\x04", "offset 18: 4 sequences"),
        (18, b"\xff" * 8, "offset 18"),
        (26, b"\xff" * 8, "offset 18"),
        (62, b"\x09", "it should have 17 according to"),
        (46, b"\x01", "offset 46: the first sequence is at 1"),
        (70, b"\x01", "offset 70: the document index"),
        (94, b"\x02", "offset 70: the document index"),
    ],
)
def test_damage_found_by_opening(tmp_path: Path, offset: int, new: bytes, says: str) -> None:
    write(tmp_path / "a", [[d] for d in DOCUMENTS])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[offset : offset + len(new)] = new
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(DataError, match=says):
        IndexedDataset.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("offset", "new", "says"),
    [
        (38, struct.pack("<i", -1), "offset 38: a negative length"),
        (38, struct.pack("<i", 2), "offset 62: a pointer"),
        (54, struct.pack("<q", 5), "offset 54: a pointer"),
        (86, struct.pack("<q", 0), "offset 86: a document that ends before"),
        (86, struct.pack("<q", 9), "offset 94: a document that ends before"),
    ],
)
def test_damage_found_before_reading_samples(tmp_path: Path, offset: int, new: bytes, says: str) -> None:
    write(tmp_path / "a", [[d] for d in DOCUMENTS])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[offset : offset + len(new)] = new
    (tmp_path / "a.idx").write_bytes(index)
    dataset = IndexedDataset.open(tmp_path / "a")
    for look in (dataset.check_index, partial(verify, dataset)):
        with pytest.raises(DataError, match=says):
            look()


def test_mutated_indexes_never_pass_for_whole(tmp_path: Path) -> None:
    """Bytes flipped, cut, added, repeated: an error of ours, whichever way."""
    write(tmp_path / "a", [[d] for d in DOCUMENTS] + [[], [[9], [10, 11]]], described=True)
    whole = (tmp_path / "a.idx").read_bytes()
    chance = random.Random(0)
    found = 0
    for _ in range(160):
        mutated = bytearray(whole)
        kind = chance.randrange(4)
        at = chance.randrange(len(mutated))
        if kind == 0:
            del mutated[at:]
        elif kind == 1:
            mutated[at:at] = chance.randbytes(chance.randint(1, 12))
        else:
            size = chance.choice([1, 1, 4, 8])
            mutated[at : at + size] = chance.randbytes(len(mutated[at : at + size]))
        if bytes(mutated) == whole:
            continue
        (tmp_path / "a.idx").write_bytes(mutated)
        with pytest.raises(LmtrainError):
            verify(IndexedDataset.open(tmp_path / "a"))
        found += 1
    assert found > 150


def test_a_changed_bin_is_found(tmp_path: Path) -> None:
    write(tmp_path / "a", [[d] for d in DOCUMENTS], described=True)
    whole = (tmp_path / "a.bin").read_bytes()
    for damaged, says in (
        (whole[:-2], "has 14 bytes"),
        (whole[:-1], "no whole number"),
        (whole + b"\0\0", "has 18 bytes"),
        (b"", "has 0 bytes"),
    ):
        (tmp_path / "a.bin").write_bytes(damaged)
        with pytest.raises(DataError, match=says):
            IndexedDataset.open(tmp_path / "a")
    for damaged, says in (
        (b"\x02" + whole[1:], r"bytes 0 to 15 \(block 0\)"),
        (whole[:2] + b"\xff\xff" + whole[4:], r"bytes 0 to 15 \(block 0\)"),
    ):
        (tmp_path / "a.bin").write_bytes(damaged)
        with pytest.raises(DataError, match=says):
            verify(IndexedDataset.open(tmp_path / "a"))


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"a\.idx does not exist"):
        IndexedDataset.open(tmp_path / "a")
    write(tmp_path / "a", [[d] for d in DOCUMENTS])
    (tmp_path / "a.idx").unlink()
    with pytest.raises(MissingInputError, match=r"Make the dataset again|may be bare tokens"):
        IndexedDataset.open(tmp_path / "a")


@pytest.mark.parametrize("name", ["a.csv", "a.docx", "a.jsonl", "a.txt"])
def test_in_place_of_a_text_that_no_dataset_is_made_of_another_is_asked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("one,two\n")
    with pytest.raises(MissingInputError) as refused:
        IndexedDataset.open(tmp_path / name)
    not_read = explain_unreadable(tmp_path / name)
    assert (not_read or f"`lmtrain preprocess {tmp_path / name} ") in str(refused.value)
    assert ("`lmtrain preprocess" in str(refused.value)) == ("`lmtrain preprocess" in not_read if not_read else True)


@pytest.mark.parametrize("prefix", ["", ".", "/"])
def test_a_prefix_without_a_name_is_a_missing_dataset(prefix: str) -> None:
    with pytest.raises(MissingInputError, match=r"\.idx does not exist"):
        IndexedDataset.open(prefix)


def test_a_failed_writer_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]], described=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TypeError), DatasetWriter(tmp_path / "a", np.uint16, overwrite=True) as writer:
        add_document(writer, [np.array([2, 3]), None])  # type: ignore[list-item]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overwriting_must_be_asked_for_and_leaves_nothing_stale(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]], described=True)
    with pytest.raises(OutputError, match="is there already"), DatasetWriter(tmp_path / "a", np.uint16):
        pass
    write(tmp_path / "a", [[[2, 3]]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    (tmp_path / "b.json").write_text("mine")
    for overwrite in (False, True):
        writer = DatasetWriter(tmp_path / "b", np.uint16, overwrite=overwrite)
        with pytest.raises(OutputError, match=r"b\.json is not the sidecar"), writer:
            pass


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "a", np.uint16) as first:
        with pytest.raises(OutputError, match="in use"), DatasetWriter(tmp_path / "a", np.uint16):
            pass
        with DatasetWriter(tmp_path / "b", np.uint16) as other:
            add_document(other, [np.array([1])])
        add_document(first, [np.array([1])])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "b.bin", "b.idx"]


def test_files_of_a_killed_writer_are_replaced(tmp_path: Path) -> None:
    (tmp_path / ".a.tmp").mkdir()
    (tmp_path / ".a.tmp" / "bin").write_bytes(b"half a file")
    write(tmp_path / "a", [[[1]]])
    assert (tmp_path / "a.bin").read_bytes() == b"\x01\x00"
    assert not (tmp_path / ".a.tmp").exists()


def test_a_prefix_without_a_dataset_gets_a_suggestion(tmp_path: Path) -> None:
    for name in ("out/train.idx", "book.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name, said in {
        "book.jsonl": f"`lmtrain preprocess {tmp_path}/book.jsonl --tokenizer TOKENIZER --output {tmp_path}/book`",
        "out": f"Did you mean {tmp_path}/out/train?",
        "out/trian": f"Did you mean {tmp_path}/out/train?",
        "none": "Give a dataset's path without .bin or .idx.",
    }.items():
        with pytest.raises(MissingInputError) as refused:
            IndexedDataset.open(tmp_path / name)
        assert said in str(refused.value)
