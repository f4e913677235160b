"""Writing files and folders so that a kill at any instant leaves the old one or the new one. Torch-free.

Called by datasets, checkpoints, metrics and reports.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lmtrain.errors import DataError, MissingInputError, OutputError, StorageError
from lmtrain.runtime.files.limits import limit_reached
from lmtrain.units import format_bytes

MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 64
MAX_JSON_MEMORY = 400 << 20  # what the text and all its values may take
# because: values can take twenty times their text, as empty lists do; about what each of these marks brings along
_JSON_COSTS = {"{": 200, "[": 72, ":": 130, ",": 60}
_NO_OUTPUT = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP
)  # fmt: skip
_NO_INPUT = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_LARGE = 1 << 30  # bytes; holes in smaller files cost nothing
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def fsync_dir(folder: Path) -> None:
    fsync_file(folder, os.O_DIRECTORY)


def fsync_file(path: Path, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(path: Path) -> int:
    """Room on the disk that holds this path or, where it does not exist yet, will hold it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@contextmanager
def storage_errors(path: Path, doing: str, need_bytes: int = 0) -> Iterator[None]:
    """Turn the operating system's refusals into the errors and exit codes that users see."""
    try:
        yield
    except OSError as error:
        if reached := limit_reached(error, path, need_bytes):
            raise StorageError(f"{doing} {path} failed: {reached}") from error
        if error.errno in _NO_OUTPUT:
            way = "a shorter name" if error.errno == errno.ENAMETOOLONG else "an output that you may write"
            raise OutputError(f"{doing} {path} failed: {error.strerror}. Choose {way}.") from error
        raise StorageError(f"{doing} {path} failed: {error.strerror or error}.") from error


def open_output(path: Path, flags: int) -> int:
    """Open a plain file of ours for writing and return its descriptor; refuse a symbolic link in its place.

    A folder that the user names may be a link to another disk; a file that is written in it may not.
    """
    refuse_odd_output(path)
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, a socket
            raise _not_plain(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_plain(path)
    return fd


def refuse_odd_output(path: Path) -> None:
    """Raise for a symbolic link, a device or a pipe: root could otherwise replace /dev/null."""
    if path.is_symlink():
        raise OutputError(f"{path} is a symbolic link, and nothing is written through one. Remove the link.")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise _not_plain(path)


def _not_plain(path: Path) -> OutputError:
    return OutputError(f"{path} is not a plain file, so nothing is written to it. Choose another name for the output.")


@contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Write a file under a temporary name; it takes its own name only when whole and on disk."""
    with storage_errors(path, "Writing"):
        refuse_odd_output(path)
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
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is synced and renamed to `path` on success and removed on failure.

    Raise if `path` exists and is not empty.
    """
    with storage_errors(path, "Writing"):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise OutputError(f"{path} exists and is not empty. Choose a new --output, or remove it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        attempt = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        shutil.rmtree(attempt, ignore_errors=True)
        attempt.mkdir()
        try:
            yield attempt
            for folder, _, names in os.walk(attempt):
                for name in names:
                    fsync_file(Path(folder, name))
                fsync_dir(Path(folder))
            put_in_place(attempt, path)
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)
            raise


def put_in_place(
    folder: Path, path: Path, aside: Path | None = None, between: Callable[[], object] = lambda: None
) -> None:
    """Rename a finished folder to `path`. What is there goes to `aside` first, and comes back where that fails."""
    if aside is not None and os.path.lexists(path):
        os.rename(path, aside)
        try:
            between()
            os.rename(folder, path)
        except BaseException:
            os.rename(aside, path)
            raise
    else:
        os.rename(folder, path)
    fsync_dir(path.parent)


def remove(path: Path) -> None:
    """Take away what lies there, whatever it is; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as file:
        file.write(json_bytes(value, indent=1) + b"\n")


def json_bytes(value: Any, **form: Any) -> bytes:
    """Return JSON as UTF-8; bytes of a file name that are not UTF-8 are escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, **form).encode()
    except UnicodeEncodeError:
        return json.dumps(value, **form).encode()


def read_json(path: Path) -> Any:
    """Read a JSON file of bounded size; raise an error that names it if it is missing or damaged."""
    return parse_json(read_bytes(path, MAX_JSON_BYTES), path)


def parse_json(data: bytes | str, path: Path, most_bytes: int | None = None) -> Any:
    """Strict JSON: no key twice, no NaN, no bottomless nesting, nothing that would not fit. `path` is for the message.

    How large it is and would become is told from the text, before anything is made of it.
    """
    try:
        if problem := json_size_problem(data, most_bytes):
            raise ValueError(problem)
        value = json.loads(data, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        if is_deeper(value, MAX_JSON_DEPTH):
            raise ValueError(f"it nests deeper than {MAX_JSON_DEPTH} levels")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}). It is damaged or not one of our files.") from error
    return value


def json_size_problem(data: bytes | str, most_bytes: int | None = None) -> str | None:
    """Return why a JSON text, or the values that it would become, is too large to parse; None if it is not."""
    most_bytes = MAX_JSON_BYTES if most_bytes is None else most_bytes
    # because: of a text that is too large not even the marks are counted
    return size_problem(len(data), 0 if len(data) > most_bytes else json_memory(data), most_bytes)


def json_memory(data: bytes | str) -> int:
    """About what a text and its values take."""
    # because: one character beyond ASCII can make a text of Python's take four bytes for each
    cost = len(data) * (1 if data.isascii() else 4)
    counts = {mark: data.count(mark) if isinstance(data, str) else data.count(mark.encode()) for mark in _JSON_COSTS}
    return cost + sum(_JSON_COSTS[mark] * count for mark, count in counts.items())


def size_problem(num_bytes: int, memory: int, most_bytes: int) -> str | None:
    """Return why a JSON text of `num_bytes`, whose values take `memory` bytes, is too large; None if it is not."""
    if num_bytes > most_bytes:
        return f"it is larger than {format_bytes(most_bytes)}"
    most_memory = MAX_JSON_MEMORY * most_bytes // MAX_JSON_BYTES
    return f"its values would take more than {format_bytes(most_memory)}" if memory > most_memory else None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key stands twice")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def is_deeper(value: Any, most: int) -> bool:
    """Say whether lists and mappings stand within one another more often than so."""
    level = [value]
    for _ in range(most + 1):
        groups = [node for node in level if isinstance(node, (dict, list))]
        if not groups:
            return False
        level = [inside for node in groups for inside in (node.values() if isinstance(node, dict) else node)]
    return True


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors of reading into errors that name the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingInputError(f"{path} does not exist. Check the path.") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{path} is a symbolic link. Put the file itself in its place.") from error
        if reached := limit_reached(error, path):
            raise StorageError(f"Reading {path} failed: {reached}") from error
        if error.errno in _NO_INPUT:
            raise MissingInputError(f"{path} cannot be read: {error.strerror}. Check the path, and who may.") from error
        raise StorageError(f"Reading {path} failed: {error.strerror or error}.") from error


def forget_cached(path: Path) -> None:
    """Ask the system to drop its copy of a file that is on disk, so that the next read is the disk's own answer."""
    with read_errors(path), opened(path, follow_links=False) as (fd, size):
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)


def open_regular(path: Path, *, follow_links: bool) -> tuple[int, int]:
    """Return a descriptor and the size of a plain file; raise for a pipe or a device without waiting for it."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise DataError(f"{path} is not a plain file. Put the file itself in its place.")
    return fd, found.st_size


@contextmanager
def opened(path: Path, *, follow_links: bool = True) -> Iterator[tuple[int, int]]:
    """Give what `open_regular` does for the time of the block, and close it."""
    fd, size = open_regular(path, follow_links=follow_links)
    try:
        yield fd, size
    finally:
        os.close(fd)


def read_bytes(path: Path, limit_bytes: int, *, follow_links: bool = True) -> bytes:
    """Return a whole file; raise before reading it if it is larger than `limit_bytes`."""
    with read_errors(path), opened(path, follow_links=follow_links) as (fd, size):
        if size > limit_bytes:
            raise DataError(
                f"{path} is larger than {format_bytes(limit_bytes)}, which none of our files of its kind is."
            )
        return read_range(fd, 0, size)


def read_range(fd: int, start: int, size: int) -> bytes:
    """Exactly these bytes, or fewer where the file ends."""
    parts = []
    while size > 0:
        part = os.pread(fd, size, start)
        if not part:
            break
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def is_safe_name(name: object) -> bool:
    """Names taken from a manifest may become paths only if they are plain file names."""
    return isinstance(name, str) and _SAFE_NAME.fullmatch(name) is not None


def lock_holder(folder: Path) -> tuple[str, bool] | None:
    """Return the last owner of a folder's lock, and whether a process of this machine holds it now; take no lock."""
    path = folder / ".lock"
    try:
        number, owner = os.stat(path).st_ino, read_bytes(path, 1 << 10).decode(errors="replace").strip()
        held = any(line.split()[5].endswith(f":{number}") for line in Path("/proc/locks").read_text().splitlines())
    except (OSError, MissingInputError, IndexError):
        return None
    return owner, held


def check_output_folder(folder: Path, named: str, *, lock: bool) -> None:
    """Refuse what `folder_lock` would, and make nothing. `lock`: also whether another run has it now."""
    at = folder
    try:
        while not _is_there(at):
            at = at.parent
        is_folder = at.is_dir()
    except OSError as error:
        raise OutputError(f"{named} cannot be a folder: {error.strerror}. Choose another one.") from error
    if not is_folder:
        raise OutputError(f"{named} cannot be a folder, since {at} is a file. Choose another one.")
    if not os.access(at, os.W_OK | os.X_OK):
        raise OutputError(f"{named} cannot be written, since {at} is closed to you. Choose another one.")
    # because: a try shuts out for its instant who takes the lock in earnest
    if lock and _is_there(folder / ".lock"):
        with storage_errors(folder / ".lock", "Opening"):
            fd = open_output(folder / ".lock", os.O_RDONLY)
        try:
            _take_lock(fd, folder, fcntl.LOCK_SH)
        finally:
            os.close(fd)


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _take_lock(fd: int, folder: Path, kind: int) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(fd, 200).decode(errors="replace").strip() or "another process"
        raise OutputError(f"{folder} is in use by {owner}. Wait for it or choose another folder.") from error


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Only one run may own an output folder; the lock goes with the process, however that ends."""
    with storage_errors(folder, "Making"):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with storage_errors(path, "Opening"):
        fd = open_output(path, os.O_RDWR | os.O_CREAT)
    try:
        _take_lock(fd, folder, fcntl.LOCK_EX)
        with storage_errors(path, "Writing"):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def refuse_hole(path: Path) -> None:
    """Raise for a large file that is mostly a hole, as a download leaves that was cut short."""
    with read_errors(path):
        if os.stat(path).st_size <= _LARGE:
            return
        with opened(path) as (fd, size):
            written = at = 0
            try:
                while at < size:
                    begin = os.lseek(fd, at, os.SEEK_DATA)
                    at = os.lseek(fd, begin, os.SEEK_HOLE)
                    written += at - begin
            except OSError as error:
                if error.errno != errno.ENXIO:  # there are no more data behind this place
                    return  # a file system that does not say
    if written < size // 2:
        raise DataError(
            f"{path} has {format_bytes(size)}, of which {format_bytes(written)} were ever written: the rest is a hole. "
            "Copy the file again from where it is whole."
        )
