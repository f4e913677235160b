"""Finds the input files: files, folders and globs become a list of sources. Called by the verbs that take INPUT.

A file's name decides its kind. JSON lines: .jsonl, and compressed .jsonl.gz, .json.gz and a bare .zst. Text, one
document per file: .txt, .txt.gz. Columns: .parquet. Instead of .gz the suffix may be .zst, .bz2 or .xz. `-` is standard
input, read as JSON lines unless another format is given. This module reads no file.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmtrain.errors import DataError, MissingInputError, UsageError
from lmtrain.runtime.files.files import read_errors, refuse_hole

STDIN = Path("-")
_CODECS = ("gz", "zst", "bz2", "xz")
SUFFIXES = {  # suffix -> (kind, codec); the first match is used
    ".txt": ("text", ""),
    ".jsonl": ("jsonl", ""),
    ".parquet": ("parquet", ""),
    **{f".txt.{codec}": ("text", codec) for codec in _CODECS},
    **{f".json{line}.{codec}": ("jsonl", codec) for codec in _CODECS for line in ("l", "")},
    ".zst": ("jsonl", "zst"),
}
KNOWN = ".txt, .jsonl and .parquet, and text or lines compressed, as in .txt.gz, .jsonl.bz2, .jsonl.xz or .jsonl.zst"


@dataclass(frozen=True)
class Source:
    """An input file: its path, kind of content and compression, with size and time for identification."""

    path: Path
    kind: str  # jsonl, text or parquet
    codec: str  # an entry of _CODECS, or "" if uncompressed
    num_bytes: int = 0  # size on disk; 0 for standard input
    mtime_ns: int = 0

    @property
    def streamed(self) -> bool:
        """True if the source can only be read sequentially."""
        return bool(self.codec) or self.path == STDIN


Inputs = Sequence[str | Path | Source]


def source_of(given: str, format_: str | None) -> str | Source:
    """Resolve an input: `-` and files with an unknown suffix are read as `format_` says; return others unchanged."""
    path = Path(given)
    if path != STDIN and (format_ is None or _known(path) or not path.is_file()):
        return given
    kind, codec = SUFFIXES.get(f".{(format_ or 'jsonl').removeprefix('.')}", ("", ""))
    if not kind or (path == STDIN and kind == "parquet"):
        known = ", ".join(suffix.removeprefix(".") for suffix, (kind, _) in SUFFIXES.items() if kind != "parquet")
        rule = "has to be a file, for it is read from its end" if kind else "is none of what can be read"
        raise UsageError(f"--format={format_} {rule}. Use one of {known}.")
    return _source(path, (kind, codec))


def skipped_files(inputs: Inputs) -> list[Path]:
    """Return the files in these folders and globs that `find_sources` skips because their suffix is unknown.

    Links to folders are skipped too, because they can form a cycle.
    """
    skipped = []
    for given in inputs:
        if isinstance(given, Source) or Path(given) == STDIN:
            continue
        path = Path(given)
        if path.is_dir():
            skipped += sorted(one for one in _below(path) if not _known(one) or one.is_dir())
        elif not path.exists():
            found = map(Path, glob.iglob(str(given), recursive=True))
            skipped += sorted(one for one in found if one.is_file() and not _known(one))
    return skipped


def find_sources(inputs: Inputs) -> list[Source]:
    """Return the sources for these files, folders and globs, in the given order, folders sorted by path.

    Raise UsageError if there is no input or a file is given twice.
    """
    if not inputs:
        raise UsageError(f"No input was given. Give files ({KNOWN}), folders of them, globs, or - for standard input.")
    found = [one for given in inputs for one in _expand(given if isinstance(given, Source) else Path(given))]
    _refuse_repeated(one.path if isinstance(one, Source) else one for one in found)
    return [one if isinstance(one, Source) else _source(one) for one in found]


def _refuse_repeated(paths: Iterable[Path]) -> list[Path]:
    seen: dict[str, Path] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise UsageError(f"{path} is given more than once: it is {seen[real]}. Give every file once.")
        seen[real] = path
    return list(seen.values())


def codec_of(name: str) -> str:
    """Return the compression of a file by its suffix, "" for none."""
    return next((codec for codec in _CODECS if name.endswith(f".{codec}")), "")


def _source(path: Path, said: tuple[str, str] | None = None) -> Source:
    """Return the source for a path; `said` overrides the (kind, codec) that the suffix implies."""
    by_name = (what for suffix, what in SUFFIXES.items() if path.name.endswith(suffix))
    kind, codec = said or next(by_name, ("jsonl", ""))
    if path == STDIN:
        return Source(path, kind, codec)
    found = _stat(path)
    return Source(path, kind, codec, found.st_size, found.st_mtime_ns)


def _stat(path: Path) -> os.stat_result:
    """Return the status of a regular file, following links. Raise if it is a pipe, a device or missing."""
    try:
        with read_errors(path):
            found = os.stat(path)
    except MissingInputError as error:
        if not path.is_symlink():
            raise
        raise MissingInputError(f"{path} is a link to {os.readlink(path)}, which does not exist. Remove it.") from error
    except DataError as error:
        raise DataError(f"{path} is a link that leads back to itself. Remove it.") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(
            f"{path} is a pipe or a device, and not a file with an end and a beginning. "
            f"To read it once, give - in its place and send it there: `< {path}`."
        )
    refuse_hole(path)
    return found


def _known(path: Path) -> bool:
    return path.name.endswith(tuple(SUFFIXES))


def _expand(given: Path | Source) -> Sequence[Path | Source]:
    """Return the files that an input stands for. Raise if there are none or the kind is unknown."""
    if isinstance(given, Source) or given == STDIN:
        return [given]
    if given.is_dir():
        found = sorted(path for path in _below(given) if _known(path) and not path.is_dir())
        if not found:
            raise MissingInputError(f"{given} holds no file of a kind that is read: {KNOWN}. Check the folder.")
        return found
    if not os.path.lexists(given):
        matches = _refuse_repeated(Path(name) for name in glob.iglob(str(given), recursive=True))
        found = sorted(path for path in matches if _known(path) and not path.is_dir())
        if not found:
            raise MissingInputError(f"{given} does not exist. Give files ({KNOWN}), folders of them, or globs.")
        return found
    _stat(given)
    if not _known(given):
        way_out = "Say what it holds, as in --format txt, or convert it."
        if given.suffix == ".json":
            way_out = f"`jq -c '.[]' {given} > {given}l` makes lines of an array; if it has lines, add --format jsonl."
        raise UsageError(f"{given} is of no kind that is read: {KNOWN}. {way_out}")
    return [given]


def _below(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder that are not hidden; links to folders are yielded but not entered."""
    with read_errors(folder):
        for at, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            links = [name for name in folders if os.path.islink(os.path.join(at, name))]
            yield from (Path(at, name) for name in [*names, *links] if not name.startswith("."))


def _raise(error: OSError) -> None:
    # because: otherwise the files of an unreadable folder would be left out silently
    raise MissingInputError(f"{error.filename} cannot be looked into: {error.strerror}. Check who may.") from error
