"""Finds the input files: files, folders and globs become a list of sources. Called by the verbs that take INPUT.

A file's name decides its kind. JSON lines: .jsonl, and compressed .jsonl.gz, .json.gz and a bare .zst. Text: .txt,
.txt.gz, and the suffixes that the user names; a document per file, per paragraph or per line. Columns: .parquet.
Instead of .gz the suffix may be .zst, .bz2 or .xz. `-` is standard input, read as JSON lines unless another format is
given. This module reads no file, but for the beginning of those that are left out.
"""

from __future__ import annotations

import glob
import os
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from lmtrain.errors import (
    DataError,
    MissingInputError,
    UsageError,
    fill_in,
    join_few,
    leave_out,
    own,
    spelling_hint,
    split_ways,
    way,
)
from lmtrain.runtime.files.atomic_files import read_errors, refuse_sparse_file
from lmtrain.runtime.files.similar_path import missing_path, paths_in_one_word
from lmtrain.runtime.files.unreadable_files import explain_unreadable, is_text_file
from lmtrain.units import plural

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
_MAX_NAMED = 20  # files in a message
_SEARCHED_FILES = 1000  # of a folder, to find out whether it holds text
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
    is_binary = path != STDIN and kind == "text" and not codec and not is_text_file(path)
    if is_binary and (is_not_read := explain_unreadable(path)):
        raise UsageError(is_not_read)
    return _build_source(path, (kind, codec))


def suffix_options(suffixes: Sequence[str]) -> str:
    """Return the options of the command line that make files with these suffixes be read as text."""
    return " ".join(f"--suffix {suffix}" for suffix in suffixes)


@dataclass(frozen=True)
class TextSuffixes:
    """The suffixes, such as .py, whose files the user wants to be read as plain text besides those of SUFFIXES.

    `type_option` returns what a user has to type for some suffixes, for messages; `types_all` is True if this must name
    all suffixes at once, those of `suffixes` included.
    """

    suffixes: tuple[str, ...] = ()
    type_option: Callable[[Sequence[str]], str] = suffix_options
    types_all: bool = False

    def __post_init__(self) -> None:
        for suffix in self.suffixes:
            typed = self.type_option([suffix])
            if not suffix.startswith(".") or len(suffix) == 1 or {"/", "="} & {*suffix}:
                dotted = f".{suffix.strip('*./')}"
                is_suffix = len(dotted) > 1 and not {"/", "="} & {*dotted}
                way_out = f"Write {self._words([dotted], instead_of=typed)}" if is_suffix else "Give one such as .py"
                raise UsageError(f"{typed} names no suffix, which begins with a dot. {way_out}.")
            if known := known_suffix(Path(f"a{suffix}")):
                raise UsageError(f"{typed} has no effect: files with the suffix {known} are read anyway. Leave it out.")

    def resolve(self, inputs: Inputs) -> list[str | Path | Source]:
        """Return `inputs` with the files among them, and in their folders and globs, that have one of the suffixes, as
        sources of text. Raise MissingInputError if a folder or glob holds no readable file, UsageError if no file has
        one of the suffixes.
        """
        resolved = [part for entry in inputs for part in self._resolve_input(entry)]
        paths = [part.path for part in resolved if isinstance(part, Source)]
        for suffix in self.suffixes:
            if not any(path.name.endswith(suffix) for path in paths):
                raise UsageError(f"{self.type_option([suffix])} has no effect: no input file has this suffix. "
                                 "Leave it out, or check the inputs.")  # fmt: skip
        return resolved

    def _resolve_input(self, entry: str | Path | Source) -> Sequence[str | Path | Source]:
        """Return `entry`, an input, or the files in it if some of them are text by their suffix."""
        path = Path("-" if isinstance(entry, Source) else entry)
        if path == STDIN:
            return [entry]
        if not path.is_dir() and os.path.lexists(path):
            return [_build_source(path, self._text_kind(path)) if self._is_text(path) else entry]
        _refuse_list(path)
        files = [file for file in _files_of(path) if not file.is_dir()]
        if not any(map(self._is_text, files)):
            if not any(map(known_suffix, files)):
                raise MissingInputError(f"{_nothing_to_read(path, bool(files))} {self.left_out([path])}".strip())
            return [entry]
        return [
            _build_source(file, self._text_kind(file)) if self._is_text(file) else file
            for file in files if self._is_text(file) or known_suffix(file)
        ]  # fmt: skip

    def _words(self, suffixes: Sequence[str], instead_of: str = "") -> str:
        """Return what to type for these suffixes, marked as a way out."""
        text = self.type_option(suffixes)
        replaced = (instead_of, instead_of.replace(" ", "=", 1)) if instead_of else ()
        return way(*shlex.split(text), instead_of=replaced, shown=text)

    def left_out(self, inputs: Inputs) -> str:
        """Return two sentences on the files in the input folders and globs that are left out because their suffix is
        unknown, and on what to type to read them, marked as a way out; "" if there are none.

        Links to folders are left out too, because they can form a cycle.
        """
        files = self._skipped_files(inputs)
        if not files:
            return ""
        examples = {_name_kind(file): file for file in reversed(files)}
        counts = Counter(map(_name_kind, files))
        kinds = [kind for kind, _ in counts.most_common()]
        text = [kind for kind in kinds if kind.startswith(".") and _may_be_text_file(examples[kind])]
        explained = [explain_unreadable(file) for file in files]
        way_out = explained[0] if all(explained) else f"Folders are searched for {READABLE}."
        if text:
            option = self._words([*(self.suffixes if self.types_all else ()), *text])
            way_out = f"Add {option} to read {'it' if len(files) == 1 else 'them'} as text."
        elif len(files) <= _MAX_NAMED and kinds == [_name_kind(Path("x"))] and all(map(_may_be_text_file, files)):
            format_ = "jsonl" if files[0].read_bytes()[:1] == b"{" else "txt"
            named = way(*map(str, files), "--format", format_, instead_of=[str(path) for path in inputs])
            way_out = f"Name such files one by one, with their format: {named}."
        return f"{plural(len(files), 'file')} left out ({join_few(kinds, max_shown=5)}). {way_out}"

    def _skipped_files(self, inputs: Inputs) -> list[Path]:
        """Return the files in the input folders and globs that are left out."""
        paths = [Path(name) for name in inputs if not isinstance(name, Source) and Path(name) != STDIN]
        return [*dict.fromkeys(
            file
            for path in paths if path.is_dir() or not path.exists()
            for file in _files_of(path)
            if (not (known_suffix(file) or self._is_text(file)) and (file.is_file() or path.is_dir()))
            or (path.is_dir() and file.is_dir())
        )]  # fmt: skip

    def _is_text(self, path: Path) -> bool:
        return path.name.endswith(self.suffixes) and not known_suffix(path) and not path.is_dir()

    def _text_kind(self, path: Path) -> tuple[str, str]:
        """Return (kind, codec) of a file of text with one of the suffixes."""
        return "text", codec_of(path.name)


def resolve_text_inputs(
    inputs: Sequence[str], format_: str | None, suffixes: Sequence[str] | None, report: Callable[[str], None]
) -> Inputs:
    """Find the files that the inputs name (files, folders, globs, or "-" for standard input) and report a notice about
    files in folders that are not text. `format_` is the format of standard input and of unknown suffixes; raise
    UsageError if it applies to no input. Files with one of the `suffixes` are text.
    """
    text_suffixes = TextSuffixes(tuple(dict.fromkeys(suffixes or ())))
    sources = text_suffixes.resolve(inputs)
    notice = text_suffixes.left_out(inputs)
    resolved = [source if isinstance(source, Source) else resolve_input(str(source), format_) for source in sources]
    if format_ is not None and all(isinstance(given, Source) or isinstance(source, str)
                                   for given, source in zip(sources, resolved, strict=True)):  # fmt: skip
        raise UsageError(
            f"--format={format_} applies only to standard input (-) and to files with an unknown suffix that are named "
            f"one by one, and the inputs have neither. {leave_out()}. {notice}".strip()
        )
    if notice:
        report(split_ways(notice)[0])
    return resolved


def find_texts(
    inputs: list[str], output: Path | None, format_: str | None, suffixes: list[str] | None, keys: list[str] | None,
    *, report: Callable[[str], None],
) -> tuple[Path, Inputs]:  # fmt: skip
    """Return the prefix of the dataset to write, and what the inputs name, as `resolve_text_inputs` does. Raise
    UsageError if the prefix or the format of a file is not clear, or if no file has what --key names.
    """
    prefix = output if output is not None else _default_prefix(inputs)
    found = resolve_text_inputs(inputs, format_, suffixes, report)
    sources = find_sources(found)
    if keys:
        refuse_unused_key(sources, keys[0])
    return prefix, found


def _default_prefix(inputs: list[str]) -> Path:
    """Return the output prefix of the dataset when --output is not given: the path of the only input, a file without
    its suffixes or a folder. Raise UsageError if there are several inputs, or if the input is standard input or a glob.
    """
    path = Path(os.path.normpath(inputs[0]))
    if len(inputs) > 1 or not path.name.strip(".") or inputs[0] == "-" or is_glob(inputs[0]):
        raise UsageError(
            f"--output is not given, and {join_few(inputs, max_shown=3)} is not the path of one file or folder by "
            f"which the dataset could be called. Give {fill_in('--output', 'PREFIX')}."
        )
    return path if path.is_dir() else path.with_name(name_without_suffix(path))


def _name_kind(path: Path) -> str:
    """Return what a user calls the kind of a file that is left out: its suffix, as in .py, or .py.gz if it is
    compressed, else words.
    """
    if path.is_dir():
        return "links to folders"
    return "".join(path.suffixes[-2 if codec_of(path.name) else -1 :]) or "without a suffix"


def _may_be_text_file(path: Path) -> bool:
    """Return True if a file that is left out is probably text, by its name and its beginning."""
    return is_text_file(path) and not explain_unreadable(path)


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


def refuse_unused_key(sources: Sequence[Source], key: str) -> None:
    """Raise UsageError if none of the input files has keys or columns, of which --key names one."""
    if all(source.is_text for source in sources):
        raise UsageError(
            f"--key={key} has no effect: all inputs are plain text, which has no keys. {leave_out()}; --key names the "
            "key of the text in .jsonl files, or the column in .parquet files."
        )


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
        _refuse_list(path)
        files = [file for file in _files_of(path) if known_suffix(file) and not file.is_dir()]
        if files:
            return files
        raise MissingInputError(_nothing_to_read(path, any(not file.is_dir() for file in _files_of(path))))
    _stat(path)
    if not known_suffix(path):
        raise UsageError(explain_unreadable(path) or _unknown_suffix(path))
    return [path]


def _refuse_list(path: Path) -> None:
    """Raise UsageError if a path that does not exist is a list of paths that do."""
    if several := paths_in_one_word(path):
        raise UsageError(several)


def _unknown_suffix(path: Path) -> str:
    """Return the error message for a file whose suffix does not say what it holds, and which can be text."""
    codec = codec_of(path.name)
    text, lines = (way("--format", f"{name}.{codec}" if codec else name) for name in ("txt", "jsonl"))
    way_out = f"If it is text, add {text}; if it has lines of JSON, {lines}."
    return f"{path} has no readable suffix: {READABLE}. {way_out}"


def _nothing_to_read(path: Path, has_files: bool) -> str:
    """Return the error message for a folder, or for the pattern of a glob, in which no file is readable. `has_files` is
    True if there are files with other suffixes.
    """
    if path.is_dir():
        return f"{path} holds no file with a readable suffix: {READABLE}." + ("" if has_files else " Check the folder.")
    if has_files:
        return f"{path} matches no file with a readable suffix: {READABLE}."
    if is_glob(str(path)):
        return f"{path} matches no file. Give a pattern that does, such as 'texts/*.txt', in quotes."
    if path.with_name(f"{path.name}.idx").is_file():
        return f"{path} is a dataset, which holds tokens. Give text: files ({READABLE}), folders of them, or globs."
    hint = f"Give files ({READABLE}), folders of them, or globs."
    return missing_path(path, hint, _may_be_text)


def _may_be_text(path: Path) -> bool:
    """Return whether a path is a file with a readable suffix, or a folder that directly holds one."""
    files = islice(path.iterdir(), _SEARCHED_FILES) if path.is_dir() else [path]
    return any(known_suffix(file) for file in files)


def is_glob(text: str) -> bool:
    """Return True if a text is the pattern of a glob; a file may have wildcards in its name."""
    return glob.has_magic(text) and not os.path.lexists(text)


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
