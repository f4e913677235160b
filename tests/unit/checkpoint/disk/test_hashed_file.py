"""Files with a hash for each block: streams of any cut give the same file, and ranges are verified."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmtrain.checkpoint.disk import block_hashed_file
from lmtrain.checkpoint.disk.block_hashed_file import BlockCache, HashedFile, read_hashed, verify_file, write_hashed
from lmtrain.errors import CheckpointError


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_hashed_file, "BLOCK_BYTES", 64)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hashed")


@settings(deadline=None, max_examples=40)
@example([bytes(64), bytes(range(64))])
@example([bytes(range(65)), bytes(127)])
@example([b"", bytes(range(200)), b"", b"end"])
@given(st.lists(st.binary(max_size=200), max_size=8))
def test_parts_make_one_file_and_any_range_comes_back(folder: Path, parts: list[bytes]) -> None:
    for old in folder.iterdir():
        old.unlink()
    path, content = folder / "file", b"".join(parts)
    entry, digests = write_hashed(path, parts)
    assert path.read_bytes() == content
    assert entry.size == len(content)
    assert entry == write_hashed(path.with_name("other"), [content])[0]
    file = HashedFile(path, entry, digests)
    borders = sorted({0, 1, 63, 64, 65, len(content) // 2, len(content)})
    for start, stop in combinations_with_replacement([at for at in borders if at <= len(content)], 2):
        assert bytes(file.read(start, stop - start)) == content[start:stop]
    assert read_hashed(path, entry, 10_000) == content


@pytest.mark.parametrize("num_blocks", [1, 7, 9, 50])
@pytest.mark.parametrize("failing", [0, 6, 49])
def test_a_block_that_cannot_be_written_fails_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, failing: int
) -> None:
    """Whichever thread meets it, and no file stays open."""
    pwrite, opened = os.pwrite, os.listdir("/proc/self/fd")

    def full(fd: int, data: memoryview, at: int) -> int:
        if at == failing * 64:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with nullcontext() if failing >= num_blocks else pytest.raises(OSError, match="No space left"):
        write_hashed(tmp_path / "file", [bytes(range(64))] * num_blocks)
    assert os.listdir("/proc/self/fd") == opened


@pytest.mark.parametrize("at_most", [5, 64, 1000])
def test_short_writes_and_systems_without_direct_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_most: int
) -> None:
    open_file, pwrite = os.open, os.pwrite

    def cached_only(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", cached_only)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:at_most], at))
    content = bytes(range(256)) * 5 + b"end"
    entry, digests = write_hashed(tmp_path / "file", [content[:70], content[70:]])
    assert (tmp_path / "file").read_bytes() == content
    assert bytes(HashedFile(tmp_path / "file", entry, digests).read(0, len(content))) == content


def test_only_the_damaged_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    entry, digests = write_hashed(path, [bytes(range(256))])
    content = bytearray(path.read_bytes())
    content[130] ^= 4
    path.write_bytes(content)
    file = HashedFile(path, entry, digests)
    assert bytes(file.read(0, 128)) == bytes(range(128))
    assert bytes(file.read(192, 64)) == bytes(range(192, 256))
    with pytest.raises(CheckpointError, match=r"file is damaged in bytes 128 to 191"):
        file.read(120, 10)
    with pytest.raises(CheckpointError, match="damaged"):
        file.verify()
    with pytest.raises(CheckpointError, match="damaged"):
        read_hashed(path, entry, 10_000)


def test_a_list_of_blocks_that_is_not_the_files_is_refused(tmp_path: Path) -> None:
    entry, digests = write_hashed(tmp_path / "file", [b"x" * 200])
    for wrong in (digests[:-1], digests[::-1], [*digests, digests[0]], []):
        with pytest.raises(CheckpointError, match="list of block hashes"):
            HashedFile(tmp_path / "file", entry, wrong)


@pytest.mark.parametrize("size", [0, 1, 199, 201, 100_000])
def test_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    entry, digests = write_hashed(path, [b"x" * 200])
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match=f"file has {size} bytes, but the manifest says 200"):
        HashedFile(path, entry, digests).read(0, 1)


def test_links_pipes_and_missing_files_are_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "file"
    entry, digests = write_hashed(path, [b"x" * 200])
    file = HashedFile(path, entry, digests)
    path.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="file does not exist"):
        file.read(0, 1)
    path.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="file is a symbolic link"):
        file.read(0, 1)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="file is not a plain file"):
        file.read(0, 1)


def test_an_existing_file_or_link_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("target", "link"):
        with pytest.raises(FileExistsError):
            write_hashed(tmp_path / name, [b"new"])
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_neighbours_share_a_block_and_few_blocks_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(640)
    entry, digests = write_hashed(tmp_path / "file", [content])
    read: list[int] = []
    original = HashedFile._read_verified_block

    def note(self: HashedFile, index: int) -> bytes:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(HashedFile, "_read_verified_block", note)
    file = HashedFile(tmp_path / "file", entry, digests, BlockCache(2))
    for start in range(0, 640, 40):
        assert bytes(file.read(start, 40)) == content[start : start + 40]
    assert read == list(range(10))
    out = bytearray(300)
    file.read_into(64, memoryview(out))
    assert out == content[64:364]
    for start in (5, 70, 130, 5):
        file.read(start, 1)
    assert read[10:] == [1, 2, 3, 4, 5, 0, 1, 2, 0]


def test_a_file_against_its_entry_alone(tmp_path: Path) -> None:
    entry, _ = write_hashed(tmp_path / "file", [b"y" * 300])
    verify_file(tmp_path / "file", entry)
    (tmp_path / "file").write_bytes(b"y" * 299 + b"z")
    with pytest.raises(CheckpointError, match="file is damaged"):
        verify_file(tmp_path / "file", entry)
    (tmp_path / "file").write_bytes(b"y" * 299)
    with pytest.raises(CheckpointError, match="299 bytes"):
        verify_file(tmp_path / "file", entry)
