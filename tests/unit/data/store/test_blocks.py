"""Block checksums: computed while a dataset is written, compared whenever samples of any kind are read."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.store import block_checksums
from lmtrain.data.store.block_checksums import BLOCK_BYTES, BlockCheckTwin, BlockSums, block_sums, block_sums_twin
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError, StorageError
from lmtrain.runtime import compiled_helpers
from lmtrain.runtime.files.crc32c import crc32c
from tests.unit.data.writing import add_document

TOKENS = 100_000  # of two bytes: four blocks, the last of which is short


def write(prefix: Path, described: bool = True) -> IndexedDataset:
    with DatasetWriter(prefix, np.uint16) as writer:
        for document in range(10):
            add_document(writer, [np.arange(TOKENS // 10) % 997 + document])
        if described:
            writer.describe(tokenizer=b"{}", fingerprint="abc", vocab_size=2000, eod_id=None, num_bytes=42)
    return IndexedDataset.open(prefix)


def flip(path: Path, at: int, bit: int = 0) -> None:
    """One bit, and the file's times as they were."""
    times = path.stat()
    with open(path, "r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=12), block=st.integers(1, 17))
def test_sums_do_not_depend_on_how_a_file_grew(sizes: list[int], block: int) -> None:
    data = np.arange(sum(sizes)).astype(np.uint8)
    wanted = [crc32c(data[at : at + block]) for at in range(0, len(data), block)]
    for one in (block_sums, block_sums_twin):
        found: list[int] = []
        crc = filled = at = 0
        for size in sizes:
            sums, crc, filled = one(data[at : at + size], block, crc, filled)
            found, at = found + sums.tolist(), at + size
        assert found + [crc] * (filled > 0) == wanted
    growing = BlockSums(block)
    growing.add(memoryview(data.tobytes()))
    assert growing.sums().tolist() == wanted


@pytest.mark.skipif(not hasattr(compiled_helpers.lib, "BlockCheck"), reason="the compiled helper is not built")
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_compiled_check_equals_its_twin(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    chance, folder = random.Random(seed), tmp_path_factory.mktemp("records")
    data = np.frombuffer(chance.randbytes(chance.randrange(1, 200) * 2), np.uint8)
    block = chance.choice([2, 8, 64])
    growing = BlockSums(block)
    growing.add(data.data)
    sums = growing.sums()
    if chance.random() < 0.5:
        sums[chance.randrange(len(sums))] ^= 1
    known = np.array([chance.choice([0, 0, 1, 2]) for _ in sums], np.uint8)
    starts = np.array([chance.randrange(len(data) // 2 + 1) for _ in range(chance.randrange(6))], np.int64)
    sizes = np.minimum(chance.randrange(40), len(data) // 2 - starts)
    rows = starts // 4
    in_rows = np.minimum(sizes, len(data) // 2 - 1 - 3 * rows)
    results = []
    for build in (compiled_helpers.lib.BlockCheck, BlockCheckTwin):  # type: ignore[union-attr]
        state, path = known.copy(), folder / build.__name__
        record = os.open(path, os.O_RDWR | os.O_CREAT)
        blocks_ = build(data, block, sums, state, 2, record, -1)
        bad = [blocks_.check(starts, sizes), blocks_.check(rows, in_rows, 3, 1)]
        os.close(record)
        results.append((bad, state.tolist(), path.read_bytes()))
    assert results[0] == results[1]


def test_a_flipped_bit_is_found_when_its_block_is_read_and_not_before(tmp_path: Path) -> None:
    write(tmp_path / "a")
    flip(tmp_path / "a.bin", 2 * BLOCK_BYTES + 5, 7)
    dataset = IndexedDataset.open(tmp_path / "a")
    assert len(dataset.read(0, BLOCK_BYTES)) == BLOCK_BYTES  # two whole blocks
    assert len(dataset.read(3 * BLOCK_BYTES // 2, TOKENS)) == TOKENS - 3 * BLOCK_BYTES // 2  # the last
    where = rf"a\.bin is damaged: bytes {2 * BLOCK_BYTES} to {3 * BLOCK_BYTES - 1} \(block 2\)"
    with pytest.raises(DataError, match=where) as error:
        dataset.read(BLOCK_BYTES - 1, BLOCK_BYTES + 1)
    for word in ("lmtrain data verify", "restore the file", "data.verify=none"):
        assert word in str(error.value)
    dataset.set_verification("none", tmp_path / "record", print)
    dataset.read(0, TOKENS)


def test_any_flipped_bit_of_any_file_is_found(tmp_path: Path) -> None:
    for suffix in (".bin", ".blocks", ".idx"):
        chance = random.Random(1)
        for _ in range(25):
            path = tmp_path / f"a{suffix}"
            if not path.exists():
                write(tmp_path / "a")
            at, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
            flip(path, at, bit)
            with pytest.raises(DataError):
                IndexedDataset.open(tmp_path / "a").check_all()
            flip(path, at, bit)
        IndexedDataset.open(tmp_path / "a").check_all()


def test_shares_of_several_processes_cover_all(tmp_path: Path) -> None:
    write(tmp_path / "a")
    for parts in (1, 2, 3, 7):
        for block in range(4):
            flip(tmp_path / "a.bin", block * BLOCK_BYTES)
            found = 0
            for part in range(parts):
                try:
                    IndexedDataset.open(tmp_path / "a").check_all(part, parts)
                except DataError:
                    found += 1
            assert found >= 1
            flip(tmp_path / "a.bin", block * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("damage", "says"), [("missing", "is missing"), ("longer", "larger"), ("shorter", "not have the hash")]
)
def test_a_damaged_file_of_checksums(tmp_path: Path, damage: str, says: str) -> None:
    write(tmp_path / "a")
    path = tmp_path / "a.blocks"
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data + b"1234" if damage == "longer" else data[:-4])
    dataset = IndexedDataset.open(tmp_path / "a")
    with pytest.raises(DataError, match=says):
        dataset.read(0, 1)
    dataset = IndexedDataset.open(tmp_path / "a")
    dataset.set_verification("none", tmp_path / "record", print)
    assert dataset.read(0, 1).tolist() == [0]


def test_checksums_of_another_dataset_are_refused(tmp_path: Path) -> None:
    size = write(tmp_path / "a").token_bytes.num_bytes
    data = (tmp_path / "a.blocks").read_bytes()
    with pytest.raises(DataError, match=r"states version 1, blocks of 65536 bytes and a \.bin of 200000 bytes"):
        block_checksums.read_block_file(tmp_path / "a.blocks", hashlib.sha256(data).hexdigest(), size + 2)


@pytest.mark.parametrize("kept", [0, 11, 32, 33, -4, -1])
def test_a_short_file_with_a_matching_sidecar_is_refused(tmp_path: Path, kept: int) -> None:
    size = write(tmp_path / "a").token_bytes.num_bytes
    data = (tmp_path / "a.blocks").read_bytes()[:kept]
    (tmp_path / "a.blocks").write_bytes(data)
    with pytest.raises(DataError, match=rf"has {len(data)} bytes, but the checksums of a \.bin of {size} bytes take"):
        block_checksums.read_block_file(tmp_path / "a.blocks", hashlib.sha256(data).hexdigest(), size)


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[[], IndexedDataset]:
    write(tmp_path / "a", described=False)

    def watched() -> IndexedDataset:
        dataset = IndexedDataset.open(tmp_path / "a")
        dataset.set_verification("read", tmp_path / "index" / "record", lambda text: said.append(text))
        return dataset

    said: list[str] = []
    return watched


def test_blocks_of_a_dataset_without_checksums_are_compared_after_their_first_read(
    foreign: Callable[[], IndexedDataset], tmp_path: Path
) -> None:
    foreign().read(0, BLOCK_BYTES)
    flip(tmp_path / "a.bin", 5)
    flip(tmp_path / "a.bin", 2 * BLOCK_BYTES)  # not yet read, so nobody can know
    dataset = foreign()
    dataset.read(BLOCK_BYTES, TOKENS)
    with pytest.raises(DataError, match=r"block 0.*not what was first read.*remove .*record if you replaced"):
        dataset.read(0, 1)
    flip(tmp_path / "a.idx", 60)
    with pytest.raises(DataError, match=r"a\.idx has changed since it was first read"):
        foreign()


def test_a_damaged_record_is_written_again(tmp_path: Path) -> None:
    said: list[str] = []
    write(tmp_path / "a", described=False)
    for _ in range(2):
        dataset = IndexedDataset.open(tmp_path / "a")
        dataset.set_verification("read", tmp_path / "record", said.append)
        dataset.read(0, TOKENS)
    whole = (tmp_path / "record").read_bytes()
    assert len(whole) == 8 * 5
    assert said == []
    flip(tmp_path / "record", 9)
    dataset = IndexedDataset.open(tmp_path / "a")
    dataset.set_verification("read", tmp_path / "record", said.append)
    dataset.read(0, TOKENS)
    assert (tmp_path / "record").read_bytes() == whole
    assert "1 of 5 entries were damaged" in said[0]


def test_a_dataset_is_read_without_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path / "a", described=False)
    dataset = IndexedDataset.open(tmp_path / "a")
    dataset.set_verification("read", Path("/sys/lmtrain.index/record"), print)
    assert len(dataset.read(0, TOKENS)) == TOKENS


def test_truncating_an_open_file_is_found(tmp_path: Path) -> None:
    for size in (BLOCK_BYTES, 2 * TOKENS - 2, 1):
        dataset = write(tmp_path / f"a{size}")
        dataset.read(0, TOKENS)
        os.truncate(tmp_path / f"a{size}.bin", size)
        with pytest.raises(DataError, match=rf"has become shorter while it was in use: {size} of its 200000 bytes"):
            dataset.read(0, TOKENS) if hasattr(compiled_helpers.lib, "map_file") else dataset.check_intact()


@pytest.mark.skipif(not hasattr(compiled_helpers.lib, "map_file"), reason="the compiled helper is not built")
def test_a_file_that_was_cut_and_written_again_while_it_was_read(tmp_path: Path) -> None:
    dataset = write(tmp_path / "a")
    other = write(tmp_path / "b")
    os.truncate(tmp_path / "a.bin", 0)
    assert int(dataset.tokens.sum()) == 0  # no signal, and zeros for what is gone
    os.truncate(tmp_path / "a.bin", 2 * TOKENS)
    with pytest.raises(StorageError, match=r"Reading .*a\.bin failed while it was in use"):
        dataset.check_intact()
    del dataset
    other.read(0, TOKENS)
