"""Leave a folder as it was if the command that writes to it is refused. Torch-free.

Called around the start of a run, which writes small files into the run's folder before all of its checks are done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lmtrain.errors import LmtrainError, is_refusal
from lmtrain.runtime.files.atomic_files import LOCK, atomic_file, folder_lock, remove, remove_empty_folders

Content = tuple[bytes, int]  # of a file: its bytes, and its modification time in ns


@contextmanager
def put_back_if_refused(
    folder: Path, files: Sequence[str], folders: Sequence[str], unless_changed: str
) -> Iterator[None]:
    """Context manager: if its body is refused, put the named files of `folder` back as they were, remove those of the
    named `folders` that are new, and `folder` itself if it did not exist. Do nothing if the file `unless_changed` has
    changed by then, which shows that the body has begun its work, or if another process works in the folder.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    new = [folder / name for name in folders if not os.path.lexists(folder / name)]
    before = {folder / name: _content(folder / name) for name in (LOCK, *files) if not (folder / name).is_dir()}
    stamp = _stamp(folder / unless_changed)
    try:
        yield
    except Exception as error:
        if is_refusal(error) and _stamp(folder / unless_changed) == stamp:
            with suppress(LmtrainError, OSError):
                _put_back(folder, before, new)
            remove_empty_folders(missing)
        raise


def _put_back(folder: Path, before: dict[Path, Content | None], new: Sequence[Path]) -> None:
    """Write each file of `before` that is another now as it was, None for a file that was not there, and remove the
    folders `new` in which nobody works. Raise OutputError if another process holds the lock of `folder`.
    """
    if not any(_content(path) != content for path, content in before.items()) and not any(map(os.path.lexists, new)):
        return
    with folder_lock(folder):
        for path in filter(Path.is_dir, new):
            with suppress(LmtrainError), folder_lock(path):
                remove(path)
        for path, content in before.items():
            if _content(path) != content:  # the lock file is another by now
                _write(path, content)


def _write(path: Path, content: Content | None) -> None:
    if content is None:
        return remove(path)
    data, modified_ns = content
    if path.name == LOCK:
        path.write_bytes(data)  # because: another file in its place would not be locked
    else:
        with atomic_file(path) as file:
            file.write(data)
    os.utime(path, ns=(modified_ns, modified_ns))  # because: a start is known by the stop.json before it
    return None


def _content(path: Path) -> Content | None:
    """Return the content of a file, or None if there is none that can be read."""
    try:
        return path.read_bytes(), path.stat().st_mtime_ns
    except OSError:
        return None


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return (size, modification time in ns) of a file, None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
