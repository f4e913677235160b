"""Files: whole or not at all, strict when read, and owned by one run."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.errors import DataError, MissingInputError, OutputError, StorageError
from lmtrain.runtime.files.atomic_files import (
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    atomic_file,
    check_output_folder,
    folder_lock,
    free_bytes,
    is_safe_name,
    new_folder,
    open_regular,
    parse_json,
    put_in_place,
    read_bytes,
    read_json,
    read_range,
    storage_errors,
    write_json,
)


def test_a_file_appears_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with atomic_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(KeyError), atomic_file(path) as file:  # noqa: PT012
        file.write(b"two")
        raise KeyError
    assert path.read_bytes() == b"one"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_folder_appears_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    with pytest.raises(KeyError), new_folder(path) as folder:  # noqa: PT012
        (folder / "inner").mkdir()
        raise KeyError
    assert list(path.parent.iterdir()) == []
    path.mkdir()  # an empty one may be taken
    with new_folder(path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_bytes(b"one")
        assert list(path.iterdir()) == []
    assert (path / "inner" / "file").read_bytes() == b"one"
    with pytest.raises(OutputError, match="not empty"), new_folder(path):
        pass
    assert [p.name for p in path.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_a_folder_replaces_comes_back_where_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:  # as on some network file systems
        monkeypatch.setattr("lmtrain.runtime.files.atomic_files.exchange", lambda *_: False)
    old, new, aside = tmp_path / "old", tmp_path / "new", tmp_path / "aside"
    old.mkdir()
    (old / "file").write_bytes(b"old")

    def fail() -> None:
        assert not (old / "file").exists()
        assert old.exists() == exchanges
        raise KeyError

    new.mkdir()
    with pytest.raises(KeyError):
        put_in_place(new, old, aside, fail)
    assert (old / "file").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old"]
    put_in_place(new, old, aside)
    assert list(old.iterdir()) == []
    assert (aside / "file").read_bytes() == b"old"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_stop_between_two_names_puts_back_what_was_there(tmp_path: Path, stop: type[BaseException]) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)

    def end() -> None:
        raise stop

    with pytest.raises(stop):
        put_in_place(tmp_path / "new", tmp_path / "old", tmp_path / "aside", end)
    assert (tmp_path / "old" / "file").read_text() == "old"


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failure_while_writing_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_json(tmp_path / "f.json", {"old": 1})

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(StorageError, match=r"f\.json failed: the disk is full"):
            write_json(tmp_path / "f.json", {"new": 1})
    assert read_json(tmp_path / "f.json") == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (errno.ENOSPC, StorageError, r"Saving .*/x failed: the disk is full \(2\.0 GiB needed, .* free\)"),
        (errno.EIO, StorageError, "Input/output error"),
        (errno.EACCES, OutputError, "Permission denied"),
        (errno.EROFS, OutputError, "Read-only file system"),
    ],
)
def test_the_systems_refusals_become_ours(tmp_path: Path, number: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), storage_errors(tmp_path / "x", "Saving", need_bytes=2 << 30):
        raise OSError(number, os.strerror(number))


def test_room_is_told_for_paths_that_do_not_exist_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b" / "c") > 0


def test_room_is_what_anybody_may_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may keep blocks for root, which a run does not get."""
    disk = SimpleNamespace(f_frsize=4096, f_bsize=4096, f_blocks=1000, f_bfree=300, f_bavail=250)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    assert free_bytes(tmp_path) == 250 * 4096


@pytest.mark.parametrize("most", [1, 4, 100])
def test_a_range_is_read_whole_however_little_the_system_gives_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Linux gives less than 2 GiB at once, however much is asked for."""
    (tmp_path / "file").write_bytes(b"0123456789")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, most), at))
    with open(tmp_path / "file", "rb") as file:
        assert read_range(file.fileno(), 2, 6) == b"234567"
        assert read_range(file.fileno(), 8, 6) == b"89"  # all that is there


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json")


@settings(max_examples=25)
@given(value=JSON)
def test_json_round_trip(folder: Path, value: object) -> None:
    write_json(folder / "f.json", value)
    assert read_json(folder / "f.json") == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff", "decode"),
        (b'{"a": NaN}', "NaN is not a number of JSON"),
        (b"-Infinity", "-Infinity is not a number of JSON"),
        (b'{"a": 1, "a": 1}', "a key occurs twice"),
        (b"[" * 200_000, "recursion|Expecting"),
        (b"[" * 100 + b"]" * 100, f"deeper than {MAX_JSON_DEPTH} levels"),
        (b"1" * 5000, "digits"),
    ],
)
def test_wrong_json_is_a_data_error_that_names_the_file(text: bytes, why: str) -> None:
    with pytest.raises(DataError, match=rf"some/f\.json is not valid JSON \(.*({why})"):
        parse_json(text, Path("some/f.json"))


HUGE: dict[str, Callable[[], bytes]] = {
    "of blanks": lambda: b" " * (MAX_JSON_BYTES + 1),
    "of empty lists": lambda: b"[" + b"[]," * 4_000_000 + b"0]",
    "of numbers": lambda: b"[" + b"1," * 8_000_000 + b"0]",
    "of wide characters": lambda: b'["' + b"x" * (40 << 20) + "\U0001f600".encode() + b'"' + b",1" * 5_000_000 + b"]",
}


@pytest.mark.parametrize("kind", HUGE)
def test_json_that_memory_might_not_hold_is_refused_before_it_is_read(kind: str) -> None:
    text, began = HUGE[kind](), time.process_time()
    with pytest.raises(DataError, match=r"some/f\.json is not valid JSON \(it(s values would take more| is larger)"):
        parse_json(text, Path("some/f.json"))
    assert time.process_time() - began < 1


def test_json_of_the_greatest_depth_is_read() -> None:
    assert parse_json(b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH, Path("f")) is not None
    with pytest.raises(DataError, match="deeper"):
        parse_json(b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1), Path("f"))


def test_reading_is_bounded_and_names_what_it_finds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(MissingInputError, match="file does not exist"):
        read_bytes(path, 10)
    path.write_bytes(b"x" * 11)
    with pytest.raises(DataError, match="file is larger than the 10 B"):
        read_bytes(path, 10)
    assert read_bytes(path, 11) == b"x" * 11
    with pytest.raises(DataError, match="is not a plain file"):
        read_bytes(tmp_path, 10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is not a plain file"):
        read_bytes(tmp_path / "pipe", 10)
    with pytest.raises(MissingInputError, match="Not a directory"):
        read_bytes(path / "below", 10)


def test_links_are_followed_only_where_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_bytes(tmp_path / "link", 10) == b"x"
    with pytest.raises(DataError, match="link is a symbolic link"):
        read_bytes(tmp_path / "link", 10, follow_links=False)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        read_bytes(tmp_path / "file", 10)
        with pytest.raises(DataError):
            open_regular(tmp_path, follow_links=True)
        with pytest.raises(DataError):
            read_bytes(tmp_path / "file", 0)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("name", ["a", "rank_00000.safetensors", "A-b_c.9", "x" * 200])
def test_plain_names(name: str) -> None:
    assert is_safe_name(name)


@given(
    st.text(max_size=6)
    | st.integers()
    | st.none()
    | st.sampled_from(["..", "a/b", "/a", "a\n", "x" * 201, "\u00e9", "a\0"])
)
def test_a_safe_name_stays_in_its_folder(name: object) -> None:
    if is_safe_name(name):
        assert isinstance(name, str)
        assert Path("folder", name).parent == Path("folder")
        assert not name.startswith(".")
        assert name.isascii()
        assert name.isprintable()


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    with (
        folder_lock(tmp_path / "run"),
        pytest.raises(OutputError, match=rf"run is in use by process {os.getpid()} on .*\. Wait for it"),
        folder_lock(tmp_path / "run"),
    ):
        pass
    with folder_lock(tmp_path / "run"):
        pass


def test_no_output_goes_through_a_link(tmp_path: Path) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    run.mkdir()
    for name in (".lock", "stop.json"):
        (run / name).symlink_to(precious)
    with pytest.raises(OutputError, match=r"\.lock is a symbolic link"), folder_lock(run):
        pass
    with pytest.raises(OutputError, match=r"\.lock is a symbolic link"):
        check_output_folder(run, "run.dir", check_lock=True)
    with pytest.raises(OutputError, match=r"stop\.json is a symbolic link"):
        write_json(run / "stop.json", {})
    (run / ".config.json.tmp-1").symlink_to(precious)
    (run / f".config.json.tmp-{os.getpid()}").symlink_to(precious)
    write_json(run / "config.json", {})
    assert precious.read_text() == "mine"


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big_disk")
    with folder_lock(tmp_path / "run"):
        write_json(tmp_path / "run" / "config.json", {"a": 1})
    assert read_json(tmp_path / "big_disk" / "config.json") == {"a": 1}


def test_a_name_that_is_no_text_is_escaped(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    write_json(tmp_path / "f.json", {"files": [name]})
    assert read_json(tmp_path / "f.json") == {"files": [name]}


def test_no_file_takes_the_place_of_a_device_or_a_pipe(tmp_path: Path) -> None:
    """A user who may do everything could otherwise rename over /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="pipe is not a plain file"), atomic_file(tmp_path / "pipe"):
        pass
    assert (tmp_path / "pipe").is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]
