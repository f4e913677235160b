"""What is said of a path that does not exist, which existing path was probably meant, and of one in place of a text.

Called by everything that reads a file or folder that a user names. It reads only the names in the folder of the path.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from lmtrain.errors import UsageError, shell_quoted, way

_LIST_SIGNS = re.compile(r"[,;:\s]+")
# because: a path has lost the second slash of an address
_SCHEME = re.compile(r"([a-z][a-z0-9]{1,9}):/{1,3}(?=\w)")
_FETCHES = {
    **dict.fromkeys(("http", "https", "ftp"), "`wget {url}`"),
    "s3": "`aws s3 cp {url} .`", "gs": "`gsutil cp {url} .`", "hdfs": "`hdfs dfs -get {url}`",
    "hf": "fetch it with `hf download`",
}  # fmt: skip
_HUB_NAME = re.compile(r"[A-Za-z][\w-]*/[A-Za-z][\w.-]*[\w-]")
_FILE_SUFFIX = re.compile(r"\.[a-z]{2,8}$")
_LEAST_SIMILARITY = 0.5  # of two names without their suffixes
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
    if elsewhere := _explain_elsewhere(str(path)):
        return f"{option}{elsewhere}"
    if (similar := similar_path(Path(path), is_meant)) is None:
        return f"{option}{path} does not exist. {hint}"
    return f"{option}{path} does not exist. Did you mean {way(str(similar), instead_of=str(path))}?"


def _explain_elsewhere(path: str) -> str:
    """Return the message on a path that is an address, is in a bucket, or is probably a name on Hugging
    Face's hub: that only files of this machine are read, and how to get it; "" for another path.
    """
    if scheme := _SCHEME.match(path):
        url = f"{scheme[1]}://{path[scheme.end() :]}"
        how = _FETCHES.get(scheme[1], "copy it to a disk of this machine").format(url=shell_quoted(url))
        return f"{url} is an address, and only files of this machine are read. First {how}; then give the file."
    if _HUB_NAME.fullmatch(path) and not _FILE_SUFFIX.search(path) and not os.path.exists(path.partition("/")[0]):
        name = path.partition("/")[2]
        return (
            f"{path} does not exist, and nothing is fetched by its name on a hub. If it is one on Hugging Face's, "
            f"`hf download {path} --local-dir {name}` fetches a model or a tokenizer, and with `--repo-type "
            f"dataset` the files of a dataset; then give {name}."
        )
    return ""


def paths_in_one_word(path: Path | str, is_meant: Callable[[Path], bool] = os.path.exists) -> str:
    """Return the error message for a path that does not exist if it is a list of paths of which `is_meant` returns True
    for each, such as "a.txt,b.txt", with these as a way out; "" for another path.
    """
    parts = paths_within(path, is_meant)
    return f"{path} is several paths in one word. Write {way(*parts, instead_of=str(path))}." if parts else ""


def refuse_lists(paths: Sequence[Path], is_meant: Callable[[Path], bool] = os.path.exists) -> None:
    """Raise UsageError if one of the paths, of a verb that takes several, is a list of paths for which `is_meant`
    returns True, such as "runs/a,runs/b".
    """
    if several := next(filter(None, (paths_in_one_word(path, is_meant) for path in paths)), ""):
        raise UsageError(several)


def refuse_file_as_text(option: str, text: str, way_out: str) -> None:
    """Raise UsageError if `text`, the value of an option or argument that takes a text, is the name of an existing
    file. `option` is its name for the message, `way_out` the option to type instead to use the file.
    """
    if os.path.isfile(text):  # because: unlike Path.is_file it also takes a text that cannot be a path
        raise UsageError(
            f"{option} takes a text, but {text} is the name of a file, of which only the name would be used. Type "
            f"{way(way_out, text, instead_of=(option, text))} to use the text in the file."
        )


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
    if (numbered := _with_same_number(path)) and is_meant(numbered):
        return numbered
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
    similar_names = [name for name in similar_names if _can_be_meant(folder / name, path)]
    with_suffix = [name for name in names if name.startswith(f"{path.name}.")]
    return next((folder / name for name in [*similar_names, *with_suffix] if is_meant(folder / name)), None)


def _with_same_number(path: Path) -> Path | None:
    """Return the folder whose name has the same number as that of `path`, beside it or among the checkpoints of the run
    that it is in, such as RUN/checkpoints/step_00000002 for RUN/checkpoint-2; None if there is none.
    """
    numbers = _numbers(path.name)
    for folder in (path.parent, path.parent / "checkpoints") if len(numbers) == 1 else ():
        with suppress(OSError):
            for entry in sorted(islice(folder.iterdir(), _MAX_NAMES)):
                if _numbers(entry.name) == numbers and entry.is_dir():
                    return entry
    return None


def _numbers(name: str) -> list[str]:
    """Return the numbers in a name, without the zeros before them."""
    return [number.lstrip("0") for number in re.findall(r"[0-9]+", name)]


def _can_be_meant(found: Path, path: Path) -> bool:
    """Return whether a similar path can be meant by one that does not exist: it is not similar by its suffix alone, and
    no folder without its numbers, which would be another checkpoint.
    """
    if found.is_dir() and (numbers := _numbers(path.name)) and _numbers(found.name) != numbers:
        return False
    return difflib.SequenceMatcher(None, found.stem.lower(), path.stem.lower()).ratio() > _LEAST_SIMILARITY
