"""Which files to read: files, folders and globs become a list of sources. Called by the verbs that take INPUT.

What a file holds is said by its name. JSON lines: .jsonl, and compressed .jsonl.gz, .json.gz and alone .zst. Text, one
document a file: .txt, .txt.gz. Columns: .parquet. For .gz may stand .zst, .bz2 or .xz. `-` is standard input, read as
JSON lines. No file is opened here.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtrain.errors import MissingInputError, UsageError
from lmtrain.runtime.files import storage_errors

STDIN = Path("-")
_CODECS = ("gz", "zst", "bz2", "xz")
SUFFIXES = {  # the first that fits decides: what the file holds, and how it is compressed
    ".txt": ("text", ""),
    ".jsonl": ("jsonl", ""),
    ".parquet": ("parquet", ""),
    **{f".txt.{codec}": ("text", codec) for codec in _CODECS},
    **{f".json{line}.{codec}": ("jsonl", codec) for codec in _CODECS for line in ("l", "")},
    ".zst": ("jsonl", "zst"),
}
_KNOWN = ".txt, .jsonl, .parquet, .txt.gz, .jsonl.gz, .json.gz (or .zst, .bz2, .xz for .gz), .zst"


@dataclass(frozen=True)
class Source:
    path: Path
    kind: str  # jsonl, text or parquet
    codec: str  # one of _CODECS, or nothing
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


def codec_of(name: str) -> str:
    """How a file is compressed, whatever it holds."""
    return next((codec for codec in _CODECS if name.endswith(f".{codec}")), "")


def _source(path: Path) -> Source:
    if path == STDIN:
        return Source(path, "jsonl", "")
    found = path.stat()
    kind, codec = next(what for suffix, what in SUFFIXES.items() if path.name.endswith(suffix))
    return Source(path, kind, codec, found.st_size, found.st_mtime_ns)


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
