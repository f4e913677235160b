"""A record of what reaches the disk, for tests of the order in which files are synced and take their names.

After a power cut a file has the bytes, and a folder the names, with which they were last synced; what was not synced
may be there, be empty or be missing. So a file is synced before it is renamed, its folder after that, and what it has
replaced is removed last. Two things are taken for granted, as file systems with a journal give them: names taken one
after the other reach the disk in this order, and a new folder's own name does with the first sync of anything in it.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.data.store.index_cache import FACTS
from lmtrain.data.store.indexed_dataset import SUFFIXES
from lmtrain.runtime.files import atomic_files

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lmtrain", "data_tools")
RENAMES = ("rename", "renames", "replace", "link", "symlink")  # of os
# files that a power cut may tear -> why nobody waits for the disk
NOT_SYNCED = {
    "*.lock": "names the process that works now",
    "journal.jsonl": "each line is compared with the files that it describes before it is believed",
}
# a folder's file that describes all others in it, and so is synced after them
DESCRIPTIONS = (MANIFEST, FACTS)
_METHODS = ("rename", "replace", "hardlink_to", "symlink_to")  # of Path
_RENAME = re.compile(rf"\b(os|shutil)\.({'|'.join(RENAMES)}|move)\b|\.({'|'.join(_METHODS)})\([^'\"]")
Inode = tuple[int, int]


class DiskRecord:
    """Record of what a power cut would leave of the folder `root`; `faults` lists what was asked too early."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.root, self.faults = root, list[str]()
        self.callers: set[tuple[str, str]] = set()  # (file, function) in the packages that gave a file its name
        self._synced: dict[Inode, object] = {}  # -> what it held when it was last synced
        self._moved: dict[Inode, Inode] = {}  # -> the folder in which the disk still has its old name
        self._renamed: set[Inode] = set()
        self._open: list[int] = []  # because: the number of an inode is used again once nothing holds it
        for path in _everything(root):  # has been there for long
            self._synced[_inode(path)] = _content(path)
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._sync(getattr(os, name)))
        for name in RENAMES:
            patch.setattr(os, name, self._rename(getattr(os, name)))
        # because: Python has no function for this call of the system
        patch.setattr(atomic_files, "exchange", self._rename(atomic_files.exchange))
        for name in ("unlink", "remove", "rmdir"):
            patch.setattr(os, name, self._remove(getattr(os, name)))

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)

    def problems(self, *not_synced: str) -> list[str]:
        """Return what was asked too early, and what a power cut now would take from files or their names. Files of
        NOT_SYNCED do not count, nor do those whose names match one of the patterns `not_synced`.
        """
        for path in _everything(self.root):
            if not any(fnmatch(path.name, pattern) for pattern in (*NOT_SYNCED, *not_synced)):
                if path.is_file():
                    self._check_synced(path, "in the end")
                if (path.is_file() or _inode(path) in self._renamed) and not self._has_name(path):
                    self.faults.append(f"{self._shown(path)} has its name in a folder that is not synced since")
        return self.faults

    def _sync(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def recorded(fd: int) -> None:
            path, inode, content = Path(os.readlink(f"/proc/self/fd/{fd}")), _inode(fd), _content(f"/proc/self/fd/{fd}")
            if path.name.lstrip(".").partition(".tmp-")[0] in DESCRIPTIONS:
                for other in set(path.parent.iterdir()) - {path}:
                    self._check_synced(other, f"before {path.name}, which describes it")
            self._synced[inode] = content
            names = content.values() if isinstance(content, dict) else ()
            self._moved = {at: folder for at, folder in self._moved.items() if folder != inode and at not in names}
            self._open.append(os.dup(fd))
            sync(fd)

        return recorded

    def _rename(self, rename: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*names: Any, **options: Any) -> Any:
            old, new = map(Path, names)
            self.callers.add(_caller())
            if new.name in NOT_SYNCED:
                return rename(*names, **options)
            for path in _everything(old):
                self._check_synced(path, f"before it becomes {self._shown(new)}")
            # because: a dataset with an .idx counts as whole; that of the old one is moved into a hidden folder
            if new.suffix == ".idx" and not new.parent.name.startswith("."):
                waiting = [suffix for suffix in SUFFIXES if suffix != ".idx" and old.with_suffix(suffix).exists()]
                self.faults += [f"{self._shown(new)} has its name before the {suffix}" for suffix in waiting]
            result = rename(*names, **options)
            if result is not False:  # as of `exchange`, where the file system cannot
                has_both = old.exists() and _inode(old) == _inode(new)  # of a link
                for path, before in ((new, old), (old, new)):
                    if path.exists():
                        self._renamed.add(_inode(path))
                        if not has_both:
                            self._moved.setdefault(_inode(path), _inode(before.parent))
            return result

        return recorded

    def _remove(self, remove: Callable[..., None]) -> Callable[..., None]:
        def removed(name: Any, *, dir_fd: int | None = None) -> None:
            path = Path(name) if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"), name)
            for each in (path, *path.parents):
                if each.exists() and _inode(each) in self._moved:
                    self.faults.append(f"{self._shown(path)} is removed while the disk has it under its old name")
            remove(name, dir_fd=dir_fd)

        return removed

    def _check_synced(self, path: Path, when: str) -> None:
        if self._synced.get(_inode(path)) != _content(path):
            self.faults.append(f"{self._shown(path)} is not synced {when}")

    def _shown(self, path: Path) -> str:
        return os.path.relpath(path, self.root)

    def _has_name(self, path: Path) -> bool:
        names = self._synced.get(_inode(path.parent))
        return isinstance(names, dict) and names.get(path.name) == _inode(path)


def _everything(path: Path) -> Iterator[Path]:
    yield path
    yield from path.rglob("*")


def _inode(path: Path | int) -> Inode:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _content(path: Path | str) -> object:
    """Return the bytes of a file, or the names in a folder and the inodes that they name."""
    if not os.path.isdir(path):
        return Path(path).read_bytes()
    return {entry.name: (entry.stat(follow_symlinks=False).st_dev, entry.inode()) for entry in os.scandir(path)}


def _caller() -> tuple[str, str]:
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            return str(path.relative_to(ROOT)), frame.f_code.co_qualname.replace("<locals>.", "")
        frame = frame.f_back
    return "", ""


def renaming_functions(root: Path = ROOT) -> set[tuple[str, str]]:
    """Return (file, function) wherever the packages mention a function that gives a file another name."""
    return {
        (str(path.relative_to(root)), function)
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        if _RENAME.search(text := path.read_text(encoding="utf-8"))  # because: to parse them all takes seconds
        for function in _functions_that_rename(ast.parse(text), "")
    }


def _functions_that_rename(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _functions_that_rename(node, f"{name}.{node.name}".lstrip("."))
            continue
        if isinstance(node, ast.Attribute) and node.attr in (*RENAMES, "move") and _is_module(node.value):
            yield name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            # because: `replace` of a text takes two arguments, and that of a data class has names for them
            yield from [name] if len(node.args) == 1 and not node.keywords else []
        yield from _functions_that_rename(node, name)


def _is_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("os", "shutil")
