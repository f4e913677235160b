"""A corpus that is present on every machine with Python: the standard library's own sources and texts.

Called by the first tutorial, which must run without a download, through `build_stdlib_corpus`. Tests are left out, so
that a full CPython and a distribution's stripped one give nearly the same corpus (about 10 MB). The choice and the
order of files depend on a hash of their names alone, never on the file system.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools.corpus.flow.word_ngram_hashes import Hashes, shingles
from lmtrain.errors import DataError, MissingInputError
from lmtrain.runtime.files.atomic_files import atomic_file

SUFFIXES = frozenset({".py", ".txt", ".rst", ".html", ".md"})
NAMES = frozenset({"README", "ChangeLog"})
LEFT_OUT_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
TOPICS = "pydoc_data/topics.py"

MIN_FILE_BYTES = 200  # because: shorter files are empty `__init__.py` and one-line stubs
MAX_FILE_BYTES = 256 << 10  # because: no hand-written module is longer; longer files are tables or dumps
# because: the score is a mean over files; a stub adds nothing, and one long file must not be an eighth of the text
MIN_HELDOUT_FILE_BYTES, MAX_HELDOUT_FILE_BYTES = 2 << 10, 64 << 10
MAX_LINE_CHARS = 1000
MAX_DIGIT_WORDS = 0.2  # because: charmaps and constant tables have 0.2 to 0.6, hand-written modules under 0.15
SHINGLE_WORDS = 8
# because: 7 in 10 files of the standard library share less than 0.05 with any other file, namely licence, imports and
# idiom. Files above 0.2 were written by copying (bz2 and lzma, wave and aifc, the MIME types, the codecs). A copy with
# every sixth word changed at random still shares 0.23.
NEAR_COPY = 0.2
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Document:
    """A text of Python's standard library: a source file, or a help topic."""

    source: str  # path inside the library, with forward slashes; for a pydoc topic, path/topic
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())

    @property
    def package(self) -> str:
        """The top-level folder, "." for a module at the top."""
        return self.source.split("/")[0] if "/" in self.source else "."

    @property
    def rank(self) -> str:
        """A hash of the source; documents are ordered and chosen by it."""
        return hashlib.sha256(self.source.encode()).hexdigest()


@dataclass(frozen=True)
class CorpusReport:
    """Result of the build: the number of files and their sizes."""

    num_train: int
    num_heldout: int
    train_bytes: int
    heldout_bytes: int
    num_near_copies: int  # held-out candidates too similar to other files, used for training


def build_stdlib_corpus(
    output: Path,
    *,
    heldout_ratio: float = 0.05,
    max_bytes: int = 16 << 20,
    library: Path | None = None,
) -> CorpusReport:
    """Write train.jsonl and heldout.jsonl to the folder `output` from the text files in the folder `library`, by
    default this Python's standard library. About the share `heldout_ratio` of the bytes is held out; at most
    `max_bytes` bytes of text are used in total. Return counts of documents and bytes.
    """
    library = library if library is not None else Path(sysconfig.get_path("stdlib"))
    if not library.is_dir():
        raise MissingInputError(f"{library} is not a folder. Give the folder of a Python standard library.")
    documents = _limit_bytes(max_bytes, sorted(read_library(library), key=lambda d: d.rank))
    heldout, num_near_copies = choose_heldout(documents, heldout_ratio)
    train = [d for d in documents if d.source not in heldout]
    chosen = [d for d in documents if d.source in heldout]
    if not train or not chosen:
        raise DataError(
            f"{library} gives {len(train)} texts to train on and {len(chosen)} to hold out, but both must exist. "
            "Give a whole standard library, or a larger max_bytes or heldout_ratio."
        )
    write_jsonl(output / "train.jsonl", train)
    write_jsonl(output / "heldout.jsonl", chosen)
    return CorpusReport(
        num_train=len(train),
        num_heldout=len(chosen),
        train_bytes=sum(d.num_bytes for d in train),
        heldout_bytes=sum(d.num_bytes for d in chosen),
        num_near_copies=num_near_copies,
    )


def read_library(library: Path) -> Iterator[Document]:
    """Yield a document for every usable text file under the folder `library`, sorted by path."""
    for path in sorted(library.rglob("*")):
        relative = path.relative_to(library)
        is_left_out = LEFT_OUT_FOLDERS.intersection(relative.parts[:-1]) or relative.parts[0].startswith("config-")
        has_text_name = path.suffix in SUFFIXES or path.name in NAMES
        if is_left_out or not has_text_name or path.is_symlink() or not path.is_file():
            continue
        data, source = path.read_bytes(), relative.as_posix()
        if source == TOPICS:
            with suppress(SyntaxError):
                yield from split_topics(data)
        elif is_usable(data):
            yield Document(source, data.decode())


def is_usable(data: bytes) -> bool:
    """Return True if `data`, the content of a file, is a text to use: UTF-8, neither too short nor too long, without
    very long lines, and not mostly numbers.
    """
    if not MIN_FILE_BYTES <= len(data) <= MAX_FILE_BYTES:
        return False
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    words = _WORD.findall(text)
    digits = sum(any(c.isdigit() for c in word) for word in words)
    return digits <= MAX_DIGIT_WORDS * len(words) and max(map(len, text.splitlines())) <= MAX_LINE_CHARS


def split_topics(data: bytes) -> Iterator[Document]:
    """Yield a document for each help topic of pydoc. `data` is the content of pydoc_data/topics.py, which has the only
    long English prose of the library.

    The file is a dictionary of string constants. It is parsed as syntax and never run.
    """
    for node in ast.walk(ast.parse(data)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                match key, value:
                    case ast.Constant(value=str(name)), ast.Constant(value=str(text)) if len(text) >= MIN_FILE_BYTES:
                        yield Document(f"{TOPICS}/{name}", text)


def choose_heldout(documents: Sequence[Document], ratio: float) -> tuple[set[str], int]:
    """Choose about `ratio` of the documents' bytes to be held out, without near-copies of other documents. Return the
    sources of the chosen documents, and the number of candidates refused as near-copies.

    Each package contributes its share, so that every part of the library is tested. A candidate of which too much
    occurs in the other documents taken together, candidates or not, goes to training; this never affects the other
    candidates.
    """
    position = {d.source: i for i, d in enumerate(documents)}
    candidates: list[Document] = []
    quota_bytes = 0.0
    for document in sorted(documents, key=lambda d: (d.package, d.rank)):
        quota_bytes += ratio * document.num_bytes
        if MIN_HELDOUT_FILE_BYTES <= document.num_bytes <= min(MAX_HELDOUT_FILE_BYTES, 2 * quota_bytes):
            candidates.append(document)
            quota_bytes -= document.num_bytes
    shares = overlaps([shingles(d.text, SHINGLE_WORDS) for d in documents], [position[d.source] for d in candidates])
    accepted = {d.source for d, share in zip(candidates, shares, strict=True) if share < NEAR_COPY}
    return accepted, len(candidates) - len(accepted)


def overlaps(sets: Sequence[Hashes], indices: Sequence[int]) -> list[float]:
    """Return, for each set whose index is in `indices`, the share of its hashes that also occur in any other of `sets`.
    """
    all_hashes = np.sort(np.concatenate(sets)) if len(sets) else np.zeros(0, np.uint64)
    shares = []
    for hashes in (sets[index] for index in indices):
        num_sets = np.searchsorted(all_hashes, hashes, side="right") - np.searchsorted(all_hashes, hashes, side="left")
        shares.append(float((num_sets > 1).mean()) if hashes.size else 0.0)  # each set has a hash once
    return shares


def write_jsonl(path: Path, documents: Sequence[Document]) -> None:
    """Write each document as a line of JSON with the keys text and source."""
    with atomic_file(path, "w") as file:
        file.writelines(
            json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False) + "\n"
            for document in documents
        )


def _limit_bytes(max_bytes: int, documents: Sequence[Document]) -> list[Document]:
    """Return the documents, in order, that fit into `max_bytes` bytes together; a document that does not fit is passed
    over.
    """
    chosen: list[Document] = []
    remaining = max_bytes
    for document in documents:
        if document.num_bytes <= remaining:
            chosen.append(document)
            remaining -= document.num_bytes
    return chosen
