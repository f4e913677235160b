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
from data_tools.corpora.download import (
    RemoteFile,
    ReportBytes,
    UnreachableError,
    fetch,
    has_expected_file,
    manual_instructions,
)
from data_tools.corpus.flow.run_one_corpus_step_in_workers import SPLITS, Report, Tally, check_outputs, to_line
from data_tools.read.compressed_and_parquet_readers import CODECS, archive_contents, read_rows
from lmtrain.errors import DataError, MissingInputError, UsageError, join_few, spelling_hint, way
from lmtrain.runtime.files.atomic_files import atomic_file, is_safe_name
from lmtrain.runtime.files.existing_output import made_from
from lmtrain.runtime.files.similar_path import missing_path
from lmtrain.tokenizer.text_from_json_lines import Document

DocumentsBySplit = Iterator[tuple[str, Document]]  # (split, document) pairs


# ---- texts for evaluation --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedTexts:
    """Published texts for evaluation: their files with SHA-256, and the archives that contain these files."""

    name: str
    about: str
    files: tuple[RemoteFile, ...]
    archives: tuple[RemoteFile, ...] = ()

    @property
    def max_bytes(self) -> int:
        return max(file.num_bytes for file in self.files)

    def may_match(self, name: str, num_bytes: int) -> bool:
        """Return True if a file may be a copy of one of the texts, by its name or its size."""
        return any(name == file.name or num_bytes == file.num_bytes for file in self.files)


@dataclass
class _SearchResult:
    """Published texts found in local files, and files that were refused."""

    texts: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # name -> (content, where it was found)
    refused: list[str] = field(default_factory=list)  # files that look like a text and are not, with the reason


def get_texts(
    texts: PublishedTexts, local_paths: Sequence[Path], output: Path, *,
    offline: bool = False, report: ReportBytes | None = None,
) -> dict[Path, str | None]:
    """Put the files of a published evaluation text into the folder `output`: copied from `local_paths` if these are
    given, else from OUTPUT/source, else downloaded unless `offline`. Return path in `output` -> description of where
    the file came from, None for a file that `local_paths` do not have.
    """
    origins = {f.name: "was there already" for f in texts.files if has_expected_file(output / f.name, f.sha256)}
    result = _search_copies(texts, local_paths or [path for path in [output / "source"] if path.is_dir()])
    missing = [file for file in texts.files if file.name not in result.texts and file.name not in origins]
    instructions = manual_instructions(texts.name, output, texts.files, texts.archives)
    if missing and result.refused:
        raise DataError(f"Local copies are damaged: {join_few(result.refused, '; ')}. Get them again:\n{instructions}")
    if local_paths and not result.texts:
        raise DataError(
            f"{join_few(map(str, local_paths))} contains no file of {texts.name}. It is published as\n{instructions}"
        )
    if missing and not local_paths and offline:
        raise UsageError(f"{texts.name} was not fetched: --offline was given. Bring it by other means:\n{instructions}")
    _write_texts(result, output, origins)
    if missing and not local_paths:
        _fetch_texts(texts, missing, output, origins, report, instructions)
    return {output / file.name: origins.get(file.name) for file in texts.files}


def _search_copies(texts: PublishedTexts, paths: Sequence[Path]) -> _SearchResult:
    """Search files, folders and archives for correct copies of the published texts, by their SHA-256. Return the copies
    found, and the files that looked like copies but are not.
    """
    result = _SearchResult()
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise MissingInputError(f"{path} does not exist. Give a file, folder or archive with {texts.name}.")
        for file in _candidate_files(texts, path) if path.is_dir() else [path]:
            is_parquet = file.suffix == ".parquet"
            try:
                for name, stream in (
                    _text_of_parquet(file, texts.max_bytes) if is_parquet else archive_contents(file, texts.may_match)
                ):
                    _add_text(texts, stream, str(file) if file.name.startswith(name) else f"{name} in {file}", result)
            except DataError as error:
                result.refused.append(str(error).removesuffix(". Get it again."))
    return result


def _candidate_files(texts: PublishedTexts, folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders that may be or contain one of the published texts, judged by their
    names and sizes.
    """
    archives = {archive.name for archive in texts.archives}
    for root, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(root, name) for name in sorted(names)):
            is_compressed = path.suffix.removeprefix(".") in CODECS.values() and texts.may_match(path.stem, 0)
            is_archive = path.name in archives
            if path.is_file() and (is_compressed or is_archive or texts.may_match(path.name, path.stat().st_size)):
                yield path


def _text_of_parquet(path: Path, max_bytes: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield (file name, stream) for the text from which a .parquet file of the Hugging Face Hub was made: its rows, one
    per line. Stop reading after `max_bytes` bytes.

    WikiText's rows keep their newlines, and blank lines are empty rows; LAMBADA's rows have no newlines.
    """
    lines: list[str] = []
    num_bytes = 0
    for _, rows, size, _ in read_rows(path, ("text",), 0, 1 << 20):
        lines += [text if isinstance(text, str) else "" for (text,) in rows]
        num_bytes += size
        if num_bytes > max_bytes:
            break
    has_newlines = any(line.endswith("\n") for line in lines)
    yield path.name, io.BytesIO("".join(line or " \n" if has_newlines else f"{line}\n" for line in lines).encode())


def _add_text(texts: PublishedTexts, stream: IO[bytes], origin: str, result: _SearchResult) -> None:
    """Read the stream and compare its SHA-256 with those of the published texts. If one is equal, add the content to
    `result.texts`, else add a message to `result.refused`. `origin` describes the stream in both.
    """
    data = stream.read(texts.max_bytes + 1)
    sha256 = hashlib.sha256(data).hexdigest()
    for file in texts.files:
        if file.sha256 == sha256:
            result.texts.setdefault(file.name, (data, origin))
            return
    is_short = len(data) <= texts.max_bytes
    size = f"{len(data):,} bytes, and SHA-256 {sha256}" if is_short else f"more than {texts.max_bytes:,} bytes"
    result.refused.append(f"{origin} is damaged or another text: it has {size}")


def _write_texts(result: _SearchResult, output: Path, origins: dict[str, str]) -> None:
    """Write the texts in `result` to the folder `output`, except those already in `origins`, and record in `origins`
    where each came from (file name -> description).
    """
    for name, (data, origin) in result.texts.items():
        if name not in origins:
            with atomic_file(output / name) as file:
                file.write(data)
            origins[name] = f"from {origin}"


def _fetch_texts(
    texts: PublishedTexts, missing: Sequence[RemoteFile], output: Path, origins: dict[str, str],
    report: ReportBytes | None, instructions: str,
) -> None:
    """Download the `missing` files, each from its own addresses or else from an archive, which is deleted afterwards.
    Record in `origins` (file name -> description) where each came from.

    Raise DataError or UnreachableError, with `instructions` on how to bring the files by hand, if one is still missing.
    """
    problems: list[Exception] = []
    for file in (file for file in missing if file.urls):
        if _try_fetch(file, output / file.name, report, problems):
            origins[file.name] = "fetched"
    for archive in texts.archives:
        path = output / "source" / archive.name
        if not all(file.name in origins for file in missing) and _try_fetch(archive, path, report, problems):
            _write_texts(_search_copies(texts, [path]), output, origins)
            path.unlink()
    if not all(file.name in origins for file in missing):
        for error in (error for error in problems if isinstance(error, DataError)):
            raise DataError(f"{error} Bring it by other means:\n{instructions}") from error
        causes = [cause for error in problems if isinstance(error, UnreachableError) for cause in error.problems]
        raise UnreachableError(causes, instructions)


def _try_fetch(file: RemoteFile, target: Path, report: ReportBytes | None, problems: list[Exception]) -> bool:
    """Download a published file to `target` and return True. If that fails, append the exception to `problems` and
    return False.
    """
    try:
        fetch(file.urls, target, sha256=file.sha256, num_bytes=file.num_bytes, report=report)
    except (UnreachableError, DataError) as error:
        problems.append(error)
        return False
    return True


# ---- documents to train on -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A corpus for training: its published files, and the function that reads documents from them."""

    name: str
    about: str
    files: tuple[RemoteFile, ...]  # empty: no fixed release, so the user provides files
    read: Callable[[Path, Tally], DocumentsBySplit]  # yields documents of a file; counts dropped ones in the tally
    takes: str  # description of the local files that `read` accepts, for messages


def recipes() -> dict[str, Recipe | PublishedTexts]:
    """Return name -> recipe for all corpora that `lmtrain corpus get` offers, found in the modules of this folder."""
    all_recipes: list[Recipe | PublishedTexts] = []
    for info in pkgutil.iter_modules(corpora.__path__):
        module = importlib.import_module(f"{corpora.__name__}.{info.name}")
        all_recipes += getattr(module, "RECIPES", [module.RECIPE] if hasattr(module, "RECIPE") else [])
    return {recipe.name: recipe for recipe in sorted(all_recipes, key=lambda recipe: recipe.name)}


def published_hashes() -> dict[str, str]:
    """Return file name -> expected SHA-256 for all files of the published evaluation texts, such as test sets."""
    return {
        file.name: file.sha256
        for recipe in recipes().values() if isinstance(recipe, PublishedTexts) for file in recipe.files
    }  # fmt: skip


def find_recipe(name: str) -> Recipe | PublishedTexts:
    """Return the recipe of the corpus with this name. Raise UsageError if there is none."""
    all_recipes = recipes()
    if name not in all_recipes:
        hint = spelling_hint(name, all_recipes, lambda meant: way(meant, instead_of=name))
        raise UsageError(f"{name} is not the name of a corpus. {hint}")
    return all_recipes[name]


def get_corpus(
    recipe: Recipe,
    local_paths: Sequence[Path],
    output: Path,
    *,
    offline: bool = False,
    report: ReportBytes | None = None,
    overwrite: bool = False,
) -> Report | None:
    """Write the documents of a training corpus to train.jsonl, valid.jsonl and test.jsonl in the folder `output`. They
    are read from `local_paths` or, if that is empty, from the published files, which are downloaded unless `offline`.
    Return the counts of documents; None if an earlier call has written the same. Raise OutputError if other documents
    are there, unless `overwrite` is given.

    A split without documents gets no file.
    """
    report_file, made = output / "get.report.json", made_from(["get", recipe.name], local_paths)
    existing = [path for split in SPLITS if os.path.lexists(path := output / f"{split}.jsonl")]
    if not check_outputs(existing, report_file, "text", made if existing else None, overwrite=overwrite):
        return None
    paths = list(local_paths) or fetch_files(recipe, output, offline, report)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        hint = f"For {recipe.name}, give {recipe.takes}."
        if not missing[0].exists():
            raise MissingInputError(missing_path(missing[0], hint, Path.is_file))
        raise MissingInputError(f"{missing[0]} is not a file. {hint}")
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
            raise DataError(f"{paths[0]} holds no document of {recipe.name}. Give {recipe.takes}.")
        report_file.unlink(missing_ok=True)  # because: it must not describe other documents
    for path in existing:
        if path.stem not in targets:  # a split that only the replaced corpus had
            path.unlink()
    tally.num_in += tally.dropped.total()
    return Report(f"get {recipe.name}", tally, made).write(report_file)


def fetch_files(recipe: Recipe, output: Path, offline: bool, report: ReportBytes | None) -> list[Path]:
    """Return the paths of a corpus's published files in OUTPUT/source, after downloading those that are missing. Raise
    UsageError if a file is missing and `offline`, or if the corpus has no published files.
    """
    if not recipe.files:
        raise UsageError(
            f"{recipe.name} has no fixed release to fetch. Fetch {recipe.takes} with `lmtrain corpus fetch`, and give "
            f"the files after {recipe.name}."
        )
    targets = {output / "source" / file.name: file for file in recipe.files}
    for target, file in targets.items():
        assert is_safe_name(file.name), file.name
        if has_expected_file(target, file.sha256):
            continue
        instructions = manual_instructions(recipe.name, output, recipe.files)
        if offline:
            raise UsageError(
                f"{recipe.name} was not fetched: --offline was given. Bring it by other means:\n{instructions}"
            )
        fetch(
            file.urls, target, sha256=file.sha256, num_bytes=file.num_bytes, report=report, instructions=instructions
        )
    return list(targets)


def split_from_name(name: str) -> str:
    """Return the split (train, valid or test) that a file's name contains, or train if it contains none."""
    name = name.lower()
    words = {"train": "train", "valid": "valid", "development": "valid", "dev": "valid", "test": "test"}
    return next((split for word, split in words.items() if word in name), "train")
