"""Archives are detected by their bytes, not their name; members come as streams; damage is an error with the name."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from data_tools.read.compressed_and_parquet_readers import archive_contents
from lmtrain.errors import DataError, MissingInputError
from tests.unit.data_tools.corpora.packing import tarred, zipped

FILES = {"deep/one.txt": b"1" * 700, "../../two.txt": b"22", "other.txt": b"no"}
WANTED = {"one.txt": b"1" * 700, "two.txt": b"22"}
TAR = tarred(FILES)
PACKED = {
    "a.zip": zipped(FILES), "a.tar": TAR, "a.tar.gz": gzip.compress(TAR), "a.tgz": gzip.compress(TAR),
    "a.tar.xz": lzma.compress(TAR), "a.tar.bz2": bz2.compress(TAR), "downloaded": gzip.compress(TAR),
    "nameless": zipped(FILES),
}  # fmt: skip


def read(path: Path) -> dict[str, bytes]:
    members = archive_contents(path, lambda name, size: name in WANTED or size == 2_222)
    return {name: stream.read() for name, stream in members}


@pytest.mark.parametrize("name", PACKED)
def test_wanted_members_of_any_archive(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(PACKED[name])
    assert read(tmp_path / name) == WANTED
    assert [path.name for path in tmp_path.iterdir()] == [name]


ALONE = {
    "a.txt": b"text", "a.txt.gz": gzip.compress(b"text"), "a.txt.bz2": bz2.compress(b"text"),
    "a.txt.xz": lzma.compress(b"text"), "renamed": gzip.compress(b"text"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_a_file_that_is_no_archive_is_its_own_only_content(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(ALONE[name])
    assert read(tmp_path / name) == {"renamed" if name == "renamed" else "a.txt": b"text"}


def test_a_member_is_wanted_for_its_size_too(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped({"renamed": b"x" * 2_222, "other": b"x"}))
    assert list(read(tmp_path / "a.zip")) == ["renamed"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tar.xz"])
def test_a_cut_archive_is_named(tmp_path: Path, name: str) -> None:
    whole = PACKED[name]
    (tmp_path / name).write_bytes(whole[: 700 if name == "a.tar" else len(whole) // 2])
    with pytest.raises(DataError, match=rf"{name}.*Get it again"):
        read(tmp_path / name)


def damaged_zip(*changes: tuple[int, bytes]) -> bytes:
    """The whole one, with bytes of its directory changed; places are counted from the directory's begin."""
    data = bytearray(PACKED["a.zip"])
    begin = data.index(b"PK\x01\x02")
    for at, change in changes:
        data[begin + at : begin + at + len(change)] = change
    return bytes(data)


DIRECTORIES = {
    "a name that is no UTF-8, as it says": damaged_zip((8, b"\x00\x08"), (46, b"\xff\xfe")),
    "a name of no length": damaged_zip((28, b"\0\0")),
    "a place beyond the file": damaged_zip((42, b"\xff\xff\xff\x7f")),
    "an unknown method": damaged_zip((10, b"\x63\0")),
    "a password is wanted": damaged_zip((8, b"\x01\0")),
    "a place before the file": damaged_zip(
        (PACKED["a.zip"].index(b"PK\5\6") - PACKED["a.zip"].index(b"PK\1\2") + 17, b"\1")
    ),
}


@pytest.mark.parametrize("damage", DIRECTORIES)
def test_a_directory_that_makes_no_sense_is_damage(tmp_path: Path, damage: str) -> None:
    (tmp_path / "a.zip").write_bytes(DIRECTORIES[damage])
    with pytest.raises(DataError, match=r"a\.zip.*Get it again"):
        read(tmp_path / "a.zip")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="does not exist"):
        read(tmp_path / "absent")
