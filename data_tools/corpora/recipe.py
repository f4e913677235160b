"""Definition of a corpus: its files' addresses and hashes, and how to read documents from them.

A recipe is a module in this folder with a constant RECIPE, or RECIPES; `recipes` finds them. A `Recipe` produces
training documents, and also accepts local files. `PublishedTexts` are for evaluation and stay byte for byte as
published: a text is identified by the SHA-256 of its content, whatever its name and its archive, so that any correct
copy is accepted and a damaged copy is not. Called by `lmtrain corpus get`.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from data_tools import corpora
from data_tools.corpora.fetch import RemoteFile, ReportBytes, UnreachableError, fetch, how_to_bring, is_there
from data_tools.corpus.flow.steps import Report, Tally, to_line
from data_tools.read.streams import CODECS, archive_contents, read_rows
from lmtrain.errors import DataError, MissingInputError, UsageError, join_few, spelling_hint
from lmtrain.runtime.files.files import atomic_file, is_safe_name
from lmtrain.tokenizer.json_lines import Document

SplitDocuments = Iterator[tuple[str, Document]]  # (split, document) pairs


# ---- texts for evaluation --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedTexts:
    """Files that evaluation reads, and the archives in which they are published."""

    name: str
    about: str
    files: tuple[RemoteFile, ...]
    archives: tuple[RemoteFile, ...] = ()

    @property
    def most_bytes(self) -> int:
        return max(file.num_bytes for file in self.files)

    def may_be(self, name: str, num_bytes: int) -> bool:
        """Return True if the name or the size matches: copies may have other names, damaged files other sizes."""
        return any(name == file.name or num_bytes == file.num_bytes for file in self.files)


@dataclass
class _Found:
    texts: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # name -> (content, where it was found)
    refused: list[str] = field(default_factory=list)  # files that look like a text and are not, with the reason


def get_texts(
    texts: PublishedTexts, local: Sequence[Path], output: Path, *,
    offline: bool = False, report: ReportBytes | None = None,
) -> dict[Path, str | None]:
    """Put the files into OUTPUT: from local copies, from OUTPUT/source, or downloaded.

    Return path -> origin of each file, or None if it is not among the given files.
    """
    origins = {f.name: "was there already" for f in texts.files if is_there(output / f.name, f.sha256)}
    found = _search(texts, local or [path for path in [output / "source"] if path.is_dir()])
    absent = [file for file in texts.files if file.name not in found.texts and file.name not in origins]
    way = how_to_bring(texts.name, output, texts.files, texts.archives)
    if absent and found.refused:
        raise DataError(f"{join_few(found.refused, '; ')}. Get it again:\n{way}")
    if local and not found.texts:
        raise DataError(f"{join_few(map(str, local))} holds nothing of {texts.name}. It is published as\n{way}")
    if absent and not local and offline:
        raise UsageError(f"{texts.name} was not fetched: --offline was given. Bring it by other means:\n{way}")
    _write(found, output, origins)
    if absent and not local:
        try:
            _fetch(texts, absent, output, origins, report)
        except UnreachableError as error:
            raise UnreachableError(error.problems, f", or bring it by other means:\n{way}") from error
        except DataError as error:
            raise DataError(f"{error} Bring it by other means:\n{way}") from error
    return {output / file.name: origins.get(file.name) for file in texts.files}


def _search(texts: PublishedTexts, paths: Sequence[Path]) -> _Found:
    found = _Found()
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise MissingInputError(f"{path} is not a file or folder. Give one that holds {texts.name}, or an archive.")
        for one in _files(texts, path) if path.is_dir() else [path]:
            try:
                for name, stream in (
                    _rows(one, texts.most_bytes) if one.suffix == ".parquet" else archive_contents(one, texts.may_be)
                ):
                    _judge(texts, stream, str(one) if one.name.startswith(name) else f"{name} in {one}", found)
            except DataError as error:
                found.refused.append(str(error).removesuffix(". Get it again."))
    return found


def _files(texts: PublishedTexts, folder: Path) -> Iterator[Path]:
    """Yield a folder's files that may be or contain a text: by name or size, compressed, or a known archive."""
    archives = {archive.name for archive in texts.archives}
    for root, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(root, name) for name in sorted(names)):
            packed = path.suffix.removeprefix(".") in CODECS.values() and texts.may_be(path.stem, 0)
            if path.is_file() and (packed or path.name in archives or texts.may_be(path.name, path.stat().st_size)):
                yield path


def _rows(path: Path, most_bytes: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield (name, stream) of the text that a .parquet of the Hugging Face Hub was made from, one row per line.

    WikiText's rows keep their newlines, and blank lines are empty rows; LAMBADA's rows have no newlines.
    """
    lines: list[str] = []
    num_bytes = 0
    for _, rows, size, _ in read_rows(path, ("text",), 0, 1 << 20):
        lines += [text if isinstance(text, str) else "" for (text,) in rows]
        num_bytes += size
        if num_bytes > most_bytes:
            break
    kept = any(line.endswith("\n") for line in lines)
    yield path.name, io.BytesIO("".join(line or " \n" if kept else f"{line}\n" for line in lines).encode())


def _judge(texts: PublishedTexts, stream: IO[bytes], where: str, found: _Found) -> None:
    data = stream.read(texts.most_bytes + 1)
    sha256 = hashlib.sha256(data).hexdigest()
    for file in texts.files:
        if file.sha256 == sha256:
            found.texts.setdefault(file.name, (data, where))
            return
    whole = len(data) <= texts.most_bytes
    size = f"{len(data):,} bytes, and SHA-256 {sha256}" if whole else f"more than {texts.most_bytes:,} bytes"
    found.refused.append(f"{where} is damaged or another text: it has {size}")


def _write(found: _Found, output: Path, origins: dict[str, str]) -> None:
    """Write the files that are not in `origins` yet, and add them to it."""
    for name, (data, where) in found.texts.items():
        if name not in origins:
            with atomic_file(output / name) as file:
                file.write(data)
            origins[name] = f"from {where}"


def _fetch(
    texts: PublishedTexts, absent: Sequence[RemoteFile], output: Path, origins: dict[str, str],
    report: ReportBytes | None,
) -> None:
    """Download each file from its own addresses, or else from an archive, which is deleted afterwards.

    Raise DataError or UnreachableError if a file is still missing.
    """
    problems: list[Exception] = []
    for file in (file for file in absent if file.urls):
        if _got(file, output / file.name, report, problems):
            origins[file.name] = "fetched"
    for archive in texts.archives:
        whole = output / "source" / archive.name
        if not all(file.name in origins for file in absent) and _got(archive, whole, report, problems):
            _write(_search(texts, [whole]), output, origins)
            whole.unlink()
    if not all(file.name in origins for file in absent):
        for wrong in (error for error in problems if isinstance(error, DataError)):
            raise wrong
        raise UnreachableError(
            [one for error in problems if isinstance(error, UnreachableError) for one in error.problems]
        )


def _got(file: RemoteFile, target: Path, report: ReportBytes | None, problems: list[Exception]) -> bool:
    try:
        fetch(file.urls, target, sha256=file.sha256, num_bytes=file.num_bytes, report=report)
    except (UnreachableError, DataError) as error:
        problems.append(error)
        return False
    return True


# ---- documents to train on -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    name: str
    about: str
    files: tuple[RemoteFile, ...]  # empty: no fixed release, so the user provides files
    read: Callable[[Path, Tally], SplitDocuments]
    takes: str  # description of the local files that `read` accepts


def recipes() -> dict[str, Recipe | PublishedTexts]:
    found: list[Recipe | PublishedTexts] = []
    for info in pkgutil.iter_modules(corpora.__path__):
        module = importlib.import_module(f"{corpora.__name__}.{info.name}")
        found += getattr(module, "RECIPES", [module.RECIPE] if hasattr(module, "RECIPE") else [])
    return {recipe.name: recipe for recipe in sorted(found, key=lambda one: one.name)}


def published_hashes() -> dict[str, str]:
    """Return published name -> SHA-256 of each file that evaluation reads."""
    texts = [one for one in recipes().values() if isinstance(one, PublishedTexts)]
    return {file.name: file.sha256 for one in texts for file in one.files}


def find_recipe(name: str) -> Recipe | PublishedTexts:
    known = recipes()
    if name not in known:
        raise UsageError(f"{name} is no corpus that has a recipe. {spelling_hint(name, known)}")
    return known[name]


def get_corpus(
    recipe: Recipe, local: Sequence[Path], output: Path, *, offline: bool = False, report: ReportBytes | None = None
) -> Report:
    """Write OUTPUT/{train,valid,test}.jsonl, those that the corpus has, from local or downloaded files."""
    paths = list(local) or fetch_files(recipe, output, offline, report)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise MissingInputError(f"{missing[0]} is not a file. {recipe.name} takes {recipe.takes}.")
    tally = Tally()
    with ExitStack() as stack:
        targets: dict[str, IO[bytes]] = {}
        for path in paths:
            for split, document in recipe.read(path, tally):
                if split not in targets:
                    targets[split] = stack.enter_context(atomic_file(output / f"{split}.jsonl"))
                targets[split].write(to_line(document))
                tally.num_in += 1
                tally.bytes_in += len(document["text"].encode())
                tally.keep(document["text"])
                tally.changed[f"to {split}"] += 1
        if not targets:
            raise DataError(f"{paths[0]} holds no document of {recipe.name}, which takes {recipe.takes}.")
    tally.num_in += tally.dropped.total()
    return Report(f"get {recipe.name}", tally).written(output / "get.report.json")


def fetch_files(recipe: Recipe, output: Path, offline: bool, report: ReportBytes | None) -> list[Path]:
    """Return the files of a fixed release in OUTPUT/source, downloading the missing ones."""
    if not recipe.files:
        raise UsageError(
            f"{recipe.name} has no fixed release to fetch. Fetch {recipe.takes} with `lmtrain corpus fetch`, and give "
            "the files behind the name."
        )
    targets = {output / "source" / file.name: file for file in recipe.files}
    for target, file in targets.items():
        assert is_safe_name(file.name), file.name
        if is_there(target, file.sha256):
            continue
        way = f"ring it by other means:\n{how_to_bring(recipe.name, output, recipe.files)}"
        if offline:
            raise UsageError(f"{recipe.name} was not fetched: --offline was given. B{way}")
        try:
            fetch(file.urls, target, sha256=file.sha256, num_bytes=file.num_bytes, report=report)
        except UnreachableError as error:
            raise UnreachableError(error.problems, f", or b{way}") from error
    return list(targets)


def split_of(name: str) -> str:
    """Return the split that a file's name indicates; train by default."""
    name = name.lower()
    words = {"train": "train", "valid": "valid", "development": "valid", "dev": "valid", "test": "test"}
    return next((split for word, split in words.items() if word in name), "train")
