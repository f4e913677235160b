"""What a corpus is: where its files lie, what they must hash to, and how to read documents out of them.

A recipe is a file beside this one with a constant RECIPE, or RECIPES, of this kind or of that of published.py;
`recipes` finds it there. Every recipe also takes files that the user already has. Called by `lmtrain corpus get`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from data_tools import corpora
from data_tools.corpora.fetch import RemoteFile, ReportBytes, UnreachableError, fetch, how_to_bring, is_there
from data_tools.corpora.published import Texts
from data_tools.corpus.flow.reading import to_line
from data_tools.corpus.flow.steps import Report, Tally
from lmtrain.errors import DataError, MissingInputError, UsageError, nearest
from lmtrain.runtime.files.files import atomic_file, is_safe_name, write_json
from lmtrain.tokenizer.json_lines import Document

SplitDocuments = Iterator[tuple[str, Document]]  # the split each belongs to, and the document


@dataclass(frozen=True)
class Recipe:
    name: str
    about: str
    files: tuple[RemoteFile, ...]  # none: there is no fixed release, so the user says which
    read: Callable[[Path, Tally], SplitDocuments]
    takes: str  # which local files `read` understands, in words


def recipes() -> dict[str, Recipe | Texts]:
    found: list[Recipe | Texts] = []
    for info in pkgutil.iter_modules(corpora.__path__):
        module = importlib.import_module(f"{corpora.__name__}.{info.name}")
        found += getattr(module, "RECIPES", [module.RECIPE] if hasattr(module, "RECIPE") else [])
    return {recipe.name: recipe for recipe in sorted(found, key=lambda one: one.name)}


def find_recipe(name: str) -> Recipe | Texts:
    known = recipes()
    if name not in known:
        raise UsageError(f"{name} is no corpus that has a recipe. {nearest(name, known)}")
    return known[name]


def get_corpus(
    recipe: Recipe, local: Sequence[Path], output: Path, *, offline: bool = False, report: ReportBytes | None = None
) -> Report:
    """Write OUTPUT/{train,valid,test}.jsonl, as far as there are such, from local files or fetched ones."""
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
    result = Report(f"get {recipe.name}", tally)
    write_json(output / "get.report.json", result.to_dict())
    return result


def fetch_files(recipe: Recipe, output: Path, offline: bool, report: ReportBytes | None) -> list[Path]:
    """The files of a fixed release in OUTPUT/source, where they may lie already."""
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
    """Which split a file's name speaks of."""
    name = name.lower()
    words = {"train": "train", "valid": "valid", "development": "valid", "dev": "valid", "test": "test"}
    return next((split for word, split in words.items() if word in name), "train")
