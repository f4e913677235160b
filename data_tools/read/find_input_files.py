"""Finds the input files: files, folders and globs become a list of sources. Called by the verbs that take INPUT.

A file's name decides its kind. JSON lines: .jsonl, and compressed .jsonl.gz, .json.gz and a bare .zst. Text: .txt,
.txt.gz; a document per file, per paragraph or per line. Columns: .parquet. Instead of .gz the suffix may be .zst, .bz2
or .xz. `-` is standard input, read as JSON lines unless another format is given. This module reads no file.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lmtrain.errors import DataError, MissingInputError, UsageError, leave_out, own, spelling_hint, way
from lmtrain.runtime.files.atomic_files import read_errors, refuse_sparse_file

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
TextSplit = Literal["file", "blank-line", "line"]  # what is a document of a text file
_TEXT_KINDS: dict[TextSplit, str] = {"file": "text", "blank-line": "paragraphs", "line": "lines"}
READABLE = ".txt, .jsonl and .parquet, and text or lines compressed, as in .txt.gz, .jsonl.bz2, .jsonl.xz or .jsonl.zst"


@dataclass(frozen=True)
class Source:
    """An input file: its path, kind of content and compression, with size and time for identification."""

    path: Path
    kind: str  # jsonl, text, paragraphs (text with a document between blank lines), lines (one per line) or parquet
    codec: str  # an entry of _CODECS, or "" if uncompressed
    num_bytes: int = 0  # size on disk; 0 for standard input
    mtime_ns: int = 0

    @property
    def streamed(self) -> bool:
        """True if the source can only be read sequentially."""
        return bool(self.codec) or self.path == STDIN or self.kind in ("paragraphs", "lines")

    @property
    def is_text(self) -> bool:
        """True if the source is plain text, without keys."""
        return self.kind in _TEXT_KINDS.values()


Inputs = Sequence[str | Path | Source]


def resolve_input(name: str, format_: str | None) -> str | Source:
    """Return a Source of the format `format_` if `name` is `-` or a file with an unknown suffix; return other names
    unchanged. Raise UsageError for an unknown format.
    """
    path = Path(name)
    if path != STDIN and (format_ is None or known_suffix(path) or not path.is_file()):
        return name
    kind, codec = SUFFIXES.get(f".{(format_ or 'jsonl').removeprefix('.')}", ("", ""))
    if not kind or (path == STDIN and kind == "parquet"):
        formats = [suffix.removeprefix(".") for suffix, (kind, _) in SUFFIXES.items() if kind != "parquet"]
        cause = "such a file is read from its end, so it cannot come from -" if kind else "the format is unknown"
        raise UsageError(f"--format={format_} cannot be read: {cause}. {spelling_hint(str(format_), formats, own)}")
    return _build_source(path, (kind, codec))


def skipped_files(inputs: Inputs) -> list[Path]:
    """Return the files in the input folders and globs that `find_sources` leaves out because their suffix is unknown.

    Links to folders are skipped too, because they can form a cycle.
    """
    skipped = []
    for path in (Path(name) for name in inputs if not isinstance(name, Source) and Path(name) != STDIN):
        if path.is_dir():
            skipped += [file for file in _files_of(path) if not known_suffix(file) or file.is_dir()]
        elif not path.exists():
            skipped += [file for file in _files_of(path) if not known_suffix(file) and file.is_file()]
    return skipped


def find_sources(inputs: Inputs, split: TextSplit = "file", split_option: str = "--split") -> list[Source]:
    """Return a Source for each file that the inputs (files, folders and globs) name, in the given order; the files of a
    folder or glob are sorted by path. `split` says what one document of a plain text file is, such as the whole file
    ("file"); `split_option` is the name of that option for messages.

    Raise UsageError if there is no input, a file is given twice, or there is no text file to split.
    """
    if not inputs:
        raise UsageError(f"No input was given. Give files ({READABLE}), folders, globs, or - for standard input.")
    files = [file for entry in inputs for file in _expand(entry if isinstance(entry, Source) else Path(entry))]
    _refuse_repeated(file.path if isinstance(file, Source) else file for file in files)
    sources = [file if isinstance(file, Source) else _build_source(file) for file in files]
    if split != "file" and not any(source.is_text for source in sources):
        raise UsageError(f"{split_option}={split} cuts text files into documents, and no input is one. {leave_out()}.")
    return [replace(source, kind=_TEXT_KINDS[split]) if source.is_text else source for source in sources]


def _refuse_repeated(paths: Iterable[Path]) -> None:
    """Raise UsageError if two of these paths are the same file."""
    first_paths: dict[str, Path] = {}
    for path in paths:
        real = os.path.realpath(path)
        if real in first_paths:
            raise UsageError(f"{path} is given more than once: it is {first_paths[real]}. Give every file once.")
        first_paths[real] = path


def known_suffix(path: Path) -> str:
    """Return the suffix by which a file's kind is known, "" if there is none."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), "")


def name_without_suffix(path: Path) -> str:
    """Return a file's name without the suffix by which its kind is known: a.jsonl.gz -> a."""
    return path.name.removesuffix(known_suffix(path)) or path.name


def codec_of(name: str) -> str:
    """Return the compression of a file by its suffix, "" for none."""
    return next((codec for codec in _CODECS if name.endswith(f".{codec}")), "")


def _build_source(path: Path, kind_and_codec: tuple[str, str] | None = None) -> Source:
    """Return the Source for a path, with the file's size and modification time. `kind_and_codec`, if given, replaces
    the (kind, codec) that the suffix implies.
    """
    kind, codec = kind_and_codec or SUFFIXES.get(known_suffix(path), ("jsonl", ""))
    if path == STDIN:
        return Source(path, kind, codec)
    status = _stat(path)
    return Source(path, kind, codec, status.st_size, status.st_mtime_ns)


def _stat(path: Path) -> os.stat_result:
    """Return `os.stat` of a path, following links. Raise MissingInputError if the file is missing, DataError if it is a
    pipe, a device or a sparse file.
    """
    try:
        with read_errors(path):
            status = os.stat(path)
    except MissingInputError as error:
        if not path.is_symlink():
            raise
        raise MissingInputError(f"{path} is a link to {os.readlink(path)}, which does not exist. Remove it.") from error
    except DataError as error:
        raise DataError(f"{path} is part of a cycle of links. Remove the link.") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"{path} is a pipe or a device, not a regular file. "
            f"To read it once, give - instead and redirect it: `< {path}`."
        )
    refuse_sparse_file(path)
    return status


def _expand(path: Path | Source) -> Sequence[Path | Source]:
    """Return the files of an input: itself if it is a file, or those in a folder or glob whose suffix is known. Raise
    MissingInputError if there are none, UsageError if a file's suffix is unknown.
    """
    if isinstance(path, Source) or path == STDIN:
        return [path]
    if path.is_dir() or not os.path.lexists(path):
        files = [file for file in _files_of(path) if known_suffix(file) and not file.is_dir()]
        if files:
            return files
        if path.is_dir():
            raise MissingInputError(f"{path} holds no file with a readable suffix: {READABLE}. Check the folder.")
        raise MissingInputError(f"{path} does not exist. Give files ({READABLE}), folders of them, or globs.")
    _stat(path)
    if not known_suffix(path):
        way_out = f"Add its format, as in {way('--format', 'txt')}, or convert it."
        if path.suffix == ".json":
            lines = way("--format", "jsonl")
            way_out = f"`jq -c '.[]' {path} > {path}l` makes lines of an array; if it has lines, add {lines}."
        raise UsageError(f"{path} has no readable suffix: {READABLE}. {way_out}")
    return [path]


def _files_of(path: Path) -> list[Path]:
    """Return all files and links in a folder, or all that a glob names, sorted by path."""
    return sorted(_walk(path) if path.is_dir() else map(Path, glob.iglob(str(path), recursive=True)))


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files and links below a folder that are not hidden; links to folders are yielded but not entered."""
    with read_errors(folder):
        for at, folders, names in os.walk(folder, onerror=_raise_unreadable):
            folders[:] = [name for name in folders if not name.startswith(".")]
            links = [name for name in folders if os.path.islink(os.path.join(at, name))]
            yield from (Path(at, name) for name in [*names, *links] if not name.startswith("."))


def _raise_unreadable(error: OSError) -> None:
    # because: otherwise the files of an unreadable folder would be left out silently
    raise MissingInputError(f"{error.filename} cannot be read: {error.strerror}. Check its permissions.") from error
