"""What is said of a path that does not exist: which existing path was probably meant.

Called by everything that reads a file or folder that a user names. It reads only the names in the folder of the path.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from lmtrain.errors import way

_LIST_SIGNS = re.compile(r"[,;:\s]+")
_MAX_NAMES = 10_000  # because: a folder may hold millions of files, and an error must be quick


def missing_path(
    path: Path | str, hint: str, is_meant: Callable[[Path], bool] = os.path.exists, *, option: str = ""
) -> str:
    """Return the error message for a path that does not exist: with the existing path that is similar to it as a way
    out, or with `hint`, a sentence, if there is none. `is_meant` tells which paths can be meant. `option` is the text
    before the path, such as "--data=". The path may also be a file where a folder is needed.
    """
    if os.path.exists(path):
        return f"{option}{path} is not a folder. {hint}"
    if (similar := similar_path(Path(path), is_meant)) is None:
        return f"{option}{path} does not exist. {hint}"
    return f"{option}{path} does not exist. Did you mean {way(str(similar), instead_of=str(path))}?"


def paths_in_one_word(path: Path | str, is_meant: Callable[[Path], bool] = os.path.exists) -> str:
    """Return the error message for a path that does not exist if it is a list of paths of which `is_meant` returns True
    for each, such as "a.txt,b.txt", with these as a way out; "" for another path.
    """
    parts = paths_within(path, is_meant)
    return f"{path} is several paths in one word. Write {way(*parts, instead_of=str(path))}." if parts else ""


def paths_within(path: Path | str, is_meant: Callable[[Path], bool] = os.path.exists) -> list[str]:
    """Return the paths of which a word is a list, such as "a.txt,b.txt", if it is no path and `is_meant` returns True
    for each; else [].
    """
    parts = [part for part in _LIST_SIGNS.split(str(path)) if part]
    is_list = len(parts) > 1 and not os.path.lexists(path) and all(is_meant(Path(part)) for part in parts)
    return parts if is_list else []


def similar_path(path: Path, is_meant: Callable[[Path], bool] = os.path.exists) -> Path | None:
    """Return the existing path whose names are most similar to those of `path`, if `is_meant` returns True for it;
    None if there is none. A name without its suffix is similar to the one with it.
    """
    folder = path.parent
    if not folder.is_dir():
        if folder == path or (similar := similar_path(folder, Path.is_dir)) is None:
            return None
        if is_meant(similar / path.name):
            return similar / path.name
        folder = similar
    names: list[str] = []
    with suppress(OSError):
        names = sorted(entry.name for entry in islice(os.scandir(folder), _MAX_NAMES))
    stems = {path.stem for path in map(Path, names)} - {*names}  # because: a dataset's path has no suffix
    similar_names = difflib.get_close_matches(path.name, [*names, *sorted(stems)], n=9, cutoff=0.6)
    with_suffix = [name for name in names if name.startswith(f"{path.name}.")]
    return next((folder / name for name in [*similar_names, *with_suffix] if is_meant(folder / name)), None)
