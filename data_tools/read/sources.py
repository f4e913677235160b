"""Which files to read: files, folders and globs become a list of sources. Called by the verbs that take INPUT.

What a file holds is said by its name. JSON lines: .jsonl, .jsonl.gz, .json.gz, .jsonl.zst, .json.zst, .zst. Text, one
document a file: .txt, .txt.gz, .txt.zst. Columns: .parquet. `-` is standard input, read as JSON lines. No file is
opened here.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtrain.errors import MissingInputError, UsageError
from lmtrain.runtime.files import storage_errors

STDIN = Path("-")
SUFFIXES = {  # the first that fits decides: what the file holds, and how it is compressed
    ".txt": ("text", ""),
    ".txt.gz": ("text", "gz"),
    ".txt.zst": ("text", "zst"),
    ".jsonl": ("jsonl", ""),
    ".jsonl.gz": ("jsonl", "gz"),
    ".json.gz": ("jsonl", "gz"),
    ".zst": ("jsonl", "zst"),
    ".parquet": ("parquet", ""),
}
_KNOWN = ", ".join(SUFFIXES)


@dataclass(frozen=True)
class Source:
    path: Path
    kind: str  # jsonl, text or parquet
    codec: str  # gz, zst or nothing
    num_bytes: int = 0  # on disk; of standard input nothing is known
    mtime_ns: int = 0

    @property
    def streamed(self) -> bool:
        """Whether it can only be read from its beginning."""
        return bool(self.codec) or self.path == STDIN


def find_sources(inputs: Sequence[str | Path]) -> list[Source]:
    """The files that these files, folders and globs stand for, in the order given, folders sorted by path."""
    if not inputs:
        raise UsageError(f"No input was given. Give files ({_KNOWN}), folders of them, globs, or - for standard input.")
    paths = [path for given in inputs for path in _expand(Path(given))]
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise UsageError(f"{path} is given more than once. Give every file once.")
        seen.add(path.resolve())
    with storage_errors(paths[0], "Reading"):
        return [_source(path) for path in paths]


def _source(path: Path) -> Source:
    if path == STDIN:
        return Source(path, "jsonl", "")
    found = path.stat()
    return Source(path, *_judged(path), found.st_size, found.st_mtime_ns)


def _judged(path: Path) -> tuple[str, str]:
    return next(what for suffix, what in SUFFIXES.items() if path.name.endswith(suffix))


def _readable(path: Path) -> bool:
    return path.name.endswith(tuple(SUFFIXES)) and path.is_file()


def _expand(given: Path) -> list[Path]:
    if given == STDIN:
        return [given]
    if given.is_dir():
        return list(_all_of(given))
    if given.exists():
        if not given.name.endswith(tuple(SUFFIXES)):
            raise UsageError(f"{given} is none of {_KNOWN}. Convert it, or rename it if it is one of them.")
        return [given]
    matches = sorted(Path(name) for name in glob.glob(str(given), recursive=True))  # Path.glob refuses absolute ones
    found = [path for path in matches if _readable(path)]
    if not found:
        raise MissingInputError(f"{given} does not exist. Give files ({_KNOWN}), folders of them, or globs.")
    return found


def _all_of(folder: Path) -> Iterator[Path]:
    found = sorted(path for path in folder.rglob("*") if not _hidden(path, folder) and _readable(path))
    if not found:
        raise MissingInputError(f"{folder} holds none of {_KNOWN}. Check the folder.")
    yield from found


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
