"""What a file holds is told from its bytes, not its name; members come as streams; damage is an error that names it."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from data_tools.corpora.archives import contents
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
    return {name: stream.read() for name, stream in contents(path, lambda name, size: name in WANTED or size == 2_222)}


@pytest.mark.parametrize("name", PACKED)
def test_wanted_members_of_any_archive(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(PACKED[name])
    assert read(tmp_path / name) == WANTED
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "data", "known_as"),
    [
        ("a.txt", b"text", "a.txt"),
        ("a.txt.gz", gzip.compress(b"text"), "a.txt"),
        ("a.txt.bz2", bz2.compress(b"text"), "a.txt"),
        ("a.txt.xz", lzma.compress(b"text"), "a.txt"),
        ("a", gzip.compress(b"text"), "a"),
    ],
)
def test_a_file_that_is_no_archive_is_its_own_only_content(
    tmp_path: Path, name: str, data: bytes, known_as: str
) -> None:
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name) == {known_as: b"text"}


def test_a_member_is_wanted_for_its_size_too(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped({"renamed": b"x" * 2_222, "other": b"x"}))
    assert list(read(tmp_path / "a.zip")) == ["renamed"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tar.xz"])
def test_a_cut_archive_is_named(tmp_path: Path, name: str) -> None:
    whole = PACKED[name]
    (tmp_path / name).write_bytes(whole[: 700 if name == "a.tar" else len(whole) // 2])
    with pytest.raises(DataError, match=rf"{name}.*Get it again"):
        read(tmp_path / name)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="does not exist"):
        read(tmp_path / "absent")
