"""Read and write files and folders safely: a kill at any instant leaves the old file or the new one. Torch-free.

Called by datasets, checkpoints, metrics and reports. Readers refuse links, pipes and oversized files where it matters.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lmtrain.errors import DataError, MissingInputError, OutputError, StorageError
from lmtrain.runtime.files.explain_os_errors import limit_reached
from lmtrain.runtime.files.similar_path import missing_path
from lmtrain.units import format_bytes

MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 64
MAX_JSON_MEMORY = 400 << 20  # bytes that the text and all its parsed values may take
# about how many bytes of memory each of these characters adds when parsed
# because: values can take twenty times the bytes of their text, as empty lists do
_JSON_COSTS = {"{": 200, "[": 72, ":": 130, ",": 60}
_OUTPUT_ERRNOS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP
)  # fmt: skip
_INPUT_ERRNOS = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_HOLE_CHECK_BYTES = 1 << 30  # smaller files are not checked for holes
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)  # of some network and layered file systems
LOCK = ".lock"  # the file in a folder that `folder_lock` locks; it stays
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def fsync_dir(folder: Path) -> None:
    """Flush a folder's entries, such as a rename in it, to the disk (fsync)."""
    fsync_file(folder, os.O_DIRECTORY)


def fsync_file(path: Path, flags: int = 0) -> None:
    """Flush a file's bytes to the disk (fsync). `flags` are os.open() flags, added to O_RDONLY."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds `path`, or that will hold it once it is created."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@contextmanager
def storage_errors(path: Path, action: str, need_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError of the `with` block, which writes `path`, into OutputError if another path would help, else into
    StorageError. `action` begins the message, such as "Writing". `need_bytes`, if given, is the size of the whole
    operation, which the message names if the disk is full.
    """
    try:
        yield
    except OSError as error:
        if limit_text := limit_reached(error, path, need_bytes):
            raise StorageError(f"{action} {path} failed: {limit_text}") from error
        if error.errno in _OUTPUT_ERRNOS:
            better_output = "a shorter name" if error.errno == errno.ENAMETOOLONG else "an output that you may write"
            raise OutputError(f"{action} {path} failed: {error.strerror}. Choose {better_output}.") from error
        raise StorageError(f"{action} {path} failed: {error.strerror or error}.") from error


def open_output(path: Path, flags: int) -> int:
    """Open a plain file for writing with the os.open() flags `flags` and return its descriptor. Raise OutputError if
    `path` is a link, device, pipe or socket.

    Only the file itself may not be a link: its folder may be a link to another disk.
    """
    refuse_special_file(path)
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
            raise _not_plain_error(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_plain_error(path)
    return fd


def refuse_special_file(path: Path) -> None:
    """Raise OutputError if `path`, which is to be written, is a symbolic link, a device, a pipe or a socket: root could
    otherwise replace /dev/null. Do nothing if it is a plain file or a folder, or does not exist.
    """
    if path.is_symlink():
        raise OutputError(f"{path} is a symbolic link, and nothing is written through links. Remove the link.")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise _not_plain_error(path)


def _not_plain_error(path: Path) -> OutputError:
    return OutputError(f"{path} is not a plain file, so nothing is written to it. Choose another name for the output.")


@contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Yield a new temporary file, opened with `mode` as in open(). After the `with` block it is synced and renamed to
    `path`; if the block raises, it is removed and `path` stays as it was.
    """
    with storage_errors(path, "Writing"):
        refuse_special_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        temporary.unlink(missing_ok=True)  # because: in a container a run that was killed had the same number
        try:
            fd = open_output(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            with open(fd, mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)


@contextmanager
def new_folder(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`. After the `with` block its files are synced and it is renamed to `path`;
    if the block raises, it is removed, as are those that killed processes have left. Raise OutputError if `path` exists
    and is not an empty folder, unless it `replaces` what is there.
    """
    with storage_errors(path, "Writing"):
        if not replaces and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise OutputError(f"--output {path} exists and is not empty. Choose another folder, or remove it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        attempt = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        shutil.rmtree(attempt, ignore_errors=True)
        attempt.mkdir()
        fd = _lock_if_free(attempt)  # held while this process works in it
        try:
            yield attempt
            for folder, _, names in os.walk(attempt):
                for name in names:
                    fsync_file(Path(folder, name))
                fsync_dir(Path(folder))
            if replaces and swap(attempt, path):
                fsync_dir(path.parent)
                shutil.rmtree(attempt, ignore_errors=True)
            else:
                put_in_place(attempt, path)
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)
            raise
        finally:
            if fd is not None:
                os.close(fd)


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary folders for `path` in which no process works any more."""
    for attempt in path.parent.glob(f".{glob.escape(path.name)}.tmp-[0-9]*"):
        if attempt.name.rpartition("-")[2].isdecimal() and (fd := _lock_if_free(attempt)) is not None:
            shutil.rmtree(attempt, ignore_errors=True)
            os.close(fd)


def _lock_if_free(folder: Path) -> int | None:
    """Take the exclusive lock of a folder, and return the descriptor that holds it until it is closed. Return None if
    another process holds the lock, or if the file system has no such locks.
    """
    fd = None
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if fd is not None:
            os.close(fd)
        return None
    return fd


def exchange(folder: Path, other: Path) -> bool:
    """Let two existing folders or files exchange their names at once, so that a kill leaves each under one of both.
    Return False if the system or its file system cannot.
    """
    import ctypes  # because: it is slow to import, and few commands replace a folder

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # of Linux
    if rename is None:
        return False
    if not rename(_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    if ctypes.get_errno() not in _NO_EXCHANGE:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))
    return False


def swap(folder: Path, other: Path) -> bool:
    """Let two folders or files exchange their names, at once where the file system can. Return False if the second does
    not exist.
    """
    if not os.path.lexists(other):
        return False
    if not exchange(folder, other):
        aside = folder.with_name(f"{folder.name}.aside")
        for old, new in ((other, aside), (folder, other), (aside, folder)):
            os.rename(old, new)
    return True


def put_in_place(
    folder: Path, path: Path, backup: Path | None = None, between_renames: Callable[[], object] = lambda: None
) -> None:
    """Rename a finished folder to `path` and sync the rename. With `backup`, whatever is at `path` has that name
    afterwards; the names change at once, or where the file system cannot, one after the other, and back if that fails.
    `between_renames` is called in the middle; tests inject faults there.
    """
    if backup is None or not os.path.lexists(path):
        os.rename(folder, path)
    else:
        is_exchanged = exchange(folder, path)
        if not is_exchanged:
            os.rename(path, backup)
        try:
            between_renames()
            os.rename(folder, backup if is_exchanged else path)
        except BaseException:
            exchange(folder, path) if is_exchanged else os.rename(backup, path)
            raise
    fsync_dir(path.parent)


def remove(path: Path) -> None:
    """Remove the file or the whole folder at `path`, if it exists. A symbolic link is removed, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value as an indented JSON file, atomically."""
    with atomic_file(path) as file:
        file.write(json_bytes(value, indent=1) + b"\n")


def json_bytes(value: Any, **options: Any) -> bytes:
    """Return a value as JSON text encoded in UTF-8. `options` are keyword arguments for json.dumps.

    Non-ASCII text stays as it is, unless a file name holds bytes that are not UTF-8: then all of it is escaped.
    """
    try:
        return json.dumps(value, ensure_ascii=False, **options).encode()
    except UnicodeEncodeError:
        return json.dumps(value, **options).encode()


def read_json(path: Path) -> Any:
    """Read a JSON file of bounded size; raise an error that names it if it is missing or damaged."""
    return parse_json(read_bytes(path, MAX_JSON_BYTES), path)


def parse_json(data: bytes | str, path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse JSON text strictly and return its value. Raise DataError, which names `path`, for a duplicate key, NaN,
    deep nesting, more than `max_bytes` of text or values that would take too much memory.

    The memory of the values is estimated from the text before it is parsed.
    """
    try:
        if problem := json_size_problem(data, max_bytes):
            raise ValueError(problem)
        value = json.loads(data, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        if is_nested_deeper(value, MAX_JSON_DEPTH):
            raise ValueError(f"the values nest deeper than {MAX_JSON_DEPTH} levels")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}). It is damaged or was not written by lmtrain.") from error
    return value


def json_size_problem(data: bytes | str, max_bytes: int) -> str | None:
    """Return why a JSON text is too large to parse, as the end of a message, or None. The text may have `max_bytes`;
    the memory of its parsed values is estimated and limited, too.
    """
    # because: counting characters takes time, and a text that is too large is refused without it
    return size_problem(len(data), 0 if len(data) > max_bytes else json_memory(data), max_bytes)


def json_memory(data: bytes | str) -> int:
    """Return an estimate of the bytes of memory that the JSON text `data` and the values parsed from it take together.
    The text is not parsed.
    """
    # because: one character beyond ASCII can make a Python string take four bytes for each character
    cost = len(data) * (1 if data.isascii() else 4)
    counts = {mark: data.count(mark) if isinstance(data, str) else data.count(mark.encode()) for mark in _JSON_COSTS}
    return cost + sum(_JSON_COSTS[mark] * count for mark, count in counts.items())


def size_problem(num_bytes: int, memory_bytes: int, max_bytes: int) -> str | None:
    """Return why a JSON text is too large to parse, as the end of a message, or None if it is not. The text has
    `num_bytes`, of which `max_bytes` are allowed; its parsed values take `memory_bytes`, whose limit is proportional to
    `max_bytes`.
    """
    if num_bytes > max_bytes:
        return f"it is larger than {format_bytes(max_bytes)}"
    max_memory = MAX_JSON_MEMORY * max_bytes // MAX_JSON_BYTES
    return f"its values would take more than {format_bytes(max_memory)}" if memory_bytes > max_memory else None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON, which has no NaN and no Infinity")


def is_nested_deeper(value: Any, max_depth: int) -> bool:
    """Return whether lists and mappings are nested more than `max_depth` levels deep."""
    level = [value]
    for _ in range(max_depth + 1):
        groups = [node for node in level if isinstance(node, (dict, list))]
        if not groups:
            return False
        level = [child for node in groups for child in (node.values() if isinstance(node, dict) else node)]
    return True


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the `with` block, which reads `path`, into MissingInputError (missing or not readable),
    DataError (a symbolic link that must not be followed) or StorageError (any other failure).
    """
    try:
        yield
    except FileNotFoundError as error:
        raise MissingInputError(missing_path(path, "Check the path.")) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{path} is a symbolic link. Put the file itself in its place.") from error
        if limit_text := limit_reached(error, path):
            raise StorageError(f"Reading {path} failed: {limit_text}") from error
        if error.errno in _INPUT_ERRNOS:
            raise MissingInputError(f"{path} cannot be read: {error.strerror}. Check path and permissions.") from error
        raise StorageError(f"Reading {path} failed: {error.strerror or error}.") from error


def drop_from_page_cache(path: Path) -> None:
    """Ask the system to drop a file, which is on disk, from its page cache, so that the next read is from the disk."""
    with read_errors(path), open_fd(path, follow_links=False) as (fd, size):
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)


def open_regular(path: Path, *, follow_links: bool) -> tuple[int, int]:
    """Open a plain file for reading and return (file descriptor, size in bytes). Raise DataError for a pipe or a
    device, and OSError for a symbolic link if `follow_links` is False.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise DataError(f"{path} is not a plain file. Put the file itself in its place.")
    return fd, status.st_size


@contextmanager
def open_fd(path: Path, *, follow_links: bool = True) -> Iterator[tuple[int, int]]:
    """Yield (file descriptor, size in bytes) of a plain file opened for reading, and close it after the `with` block.
    Raise OSError for a symbolic link if `follow_links` is False.
    """
    fd, size = open_regular(path, follow_links=follow_links)
    try:
        yield fd, size
    finally:
        os.close(fd)


def read_bytes(path: Path, limit_bytes: int, *, follow_links: bool = True) -> bytes:
    """Return a whole file. Raise DataError if it is larger than `limit_bytes`, before reading it, or if it is a
    symbolic link and `follow_links` is False.
    """
    with read_errors(path), open_fd(path, follow_links=follow_links) as (fd, size):
        if size > limit_bytes:
            raise DataError(
                f"{path} is larger than the {format_bytes(limit_bytes)} that are allowed for such a file. "
                "Check the path."
            )
        return read_range(fd, 0, size)


def read_range(fd: int, start: int, size: int) -> bytes:
    """Return the `size` bytes of an open file from byte offset `start` on, or fewer if the file ends before."""
    parts = []
    while size > 0:
        part = os.pread(fd, size, start)
        if not part:
            break
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def is_safe_name(name: object) -> bool:
    """Return whether a name, such as one from a manifest, is a plain file name that may become part of a path."""
    return isinstance(name, str) and _SAFE_NAME.fullmatch(name) is not None


def lock_holder(folder: Path) -> tuple[str, bool] | None:
    """Return (owner, is held) of a folder's lock: the text that its last owner wrote into the lock file, and whether a
    process of this machine holds the lock now. Return None if there is no lock file or the system does not tell.

    The lock itself is not taken, so no run is disturbed.
    """
    path = folder / LOCK
    try:
        number, owner = os.stat(path).st_ino, read_bytes(path, 1 << 10).decode(errors="replace").strip()
        is_held = any(line.split()[5].endswith(f":{number}") for line in Path("/proc/locks").read_text().splitlines())
    except (OSError, MissingInputError, IndexError):
        return None
    return owner, is_held


def check_output_folder(folder: Path, label: str, *, check_lock: bool) -> None:
    """Raise OutputError if `folder` could not be created or written, without creating anything. `label` is the name of
    the folder in messages. With `check_lock`, raise also if another process holds its `folder_lock` now.
    """
    existing = folder
    try:
        while not _exists(existing):
            existing = existing.parent
        is_folder = existing.is_dir()
    except OSError as error:
        raise OutputError(f"{label} cannot be a folder: {error.strerror}. Choose another folder.") from error
    if not is_folder:
        raise OutputError(f"{label} cannot be a folder, since {existing} is a file. Choose another folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{label} cannot be written, since you may not write to {existing}. Choose another folder.")
    # because: this check holds a shared lock for an instant, in which a run that takes the lock itself is refused
    if check_lock and _exists(folder / LOCK):
        with storage_errors(folder / LOCK, "Opening"):
            fd = open_output(folder / LOCK, os.O_RDONLY)
        try:
            _take_lock(fd, folder, fcntl.LOCK_SH)
        finally:
            os.close(fd)


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _take_lock(fd: int, folder: Path, kind: int, on_wait: Callable[[str], None] | None = None) -> None:
    """Lock an open lock file; `kind` is fcntl.LOCK_SH or LOCK_EX. If another process holds the lock, raise OutputError,
    which names `folder` and the owner; with `on_wait`, call it with the owner and wait until the lock is free.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(fd, 200).decode(errors="replace").strip() or "another process"
        if on_wait is not None:
            on_wait(owner)
            return fcntl.flock(fd, kind)
        raise OutputError(f"{folder} is in use by {owner}. Wait for it or choose another folder.") from error


@contextmanager
def folder_lock(folder: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the exclusive lock of an output folder during the `with` block; the folder is created if needed. If another
    process holds the lock, raise OutputError; with `on_wait`, call it with that process's name and wait.

    The system releases the lock when the process ends, however it ends.
    """
    with storage_errors(folder, "Making"):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with storage_errors(path, "Opening"):
        fd = open_output(path, os.O_RDWR | os.O_CREAT)
    try:
        _take_lock(fd, folder, fcntl.LOCK_EX, on_wait)
        with storage_errors(path, "Writing"):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def remove_empty_folders(folders: Iterable[Path]) -> None:
    """Remove the folders in the given order, the innermost first, until one of them holds more than the lock file of
    `folder_lock`, or cannot be removed. Raise nothing.
    """
    with suppress(OSError):
        for folder in folders:
            if os.listdir(folder) == [LOCK]:
                (folder / LOCK).unlink()
            folder.rmdir()


def refuse_sparse_file(path: Path) -> None:
    """Raise DataError for a file of more than 1 GiB of which less than half was ever written, such as an interrupted
    download leaves.
    """
    with read_errors(path):
        if os.stat(path).st_size <= _HOLE_CHECK_BYTES:
            return
        with open_fd(path) as (fd, size):
            written_bytes = position = 0
            try:
                while position < size:
                    begin = os.lseek(fd, position, os.SEEK_DATA)
                    position = os.lseek(fd, begin, os.SEEK_HOLE)
                    written_bytes += position - begin
            except OSError as error:
                if error.errno != errno.ENXIO:  # no more data follow
                    return  # the file system cannot report holes
    if written_bytes < size // 2:
        raise DataError(
            f"{path} is incomplete: only {format_bytes(written_bytes)} of its {format_bytes(size)} were written. "
            "Copy the file again from where it is complete."
        )
