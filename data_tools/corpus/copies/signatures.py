"""Exact and near copies, first and last part: every document is signed, and the marked ones are left out.

A work folder holds what the tasks tell each other: rows (position, 128-bit hash, length) and signatures from `Sign`,
the positions of copies from copies.py, which `Drop` reads. Called by the verbs of `lmtrain corpus`.
"""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from data_tools.corpus.flow.reading import Documents, find_files
from data_tools.corpus.flow.steps import Selection, Tally
from data_tools.corpus.flow.words import Hashes, mix, shingles
from data_tools.read.sources import Inputs
from lmtrain import native
from lmtrain.errors import DataError, MissingInputError
from lmtrain.runtime.files.files import read_json, write_json
from lmtrain.tokenizer.json_lines import Document

Signature = npt.NDArray[np.uint16]
Rows = npt.NDArray[np.uint64]  # [num_documents, 4]
ROW_COLUMNS = ("position", "hash_high", "hash_low", "length")
_PART = re.compile(r"rows\.part-(\d{5})-of-(\d{5})\.u64|rows\.u64")
_CHUNK = 512  # because: 512 x 256 x 8 bytes is 1 MB, which stays in a core's cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class MinHash:
    """The shape of a signature. Two texts become candidates with probability 1 - (1 - s^rows)^bands at similarity s."""

    bands: int = 32
    rows: int = 8
    words: int = 5

    @property
    def num_hashes(self) -> int:
        return self.bands * self.rows

    def signature(self, text: str) -> Signature | None:
        """None for a text without words, which is like no other."""
        found = shingles(text, self.words)
        return minima(found, self.num_hashes) if found.size else None

    def band_keys(self, signatures: Signature, band: int) -> Hashes:
        """One key a row of signatures; equal keys mean that the band is equal."""
        columns = signatures[:, band * self.rows : (band + 1) * self.rows].astype(np.uint64)
        keys = np.full(len(signatures), band, np.uint64)
        for column in columns.T:
            keys = mix(keys * _GOLDEN + column)
        return keys


@lru_cache(maxsize=4)
def _functions(count: int) -> tuple[Hashes, Hashes]:
    """Odd factors and offsets, the same everywhere and for ever."""
    numbers = mix(np.arange(1, 2 * count + 1, dtype=np.uint64) * _GOLDEN)
    return numbers[:count] | np.uint64(1), numbers[count:]


def minima(values: Hashes, count: int) -> Signature:
    """For each of `count` functions a*x + b the smallest over the values, of which bits 16 to 31 are kept."""
    factors, offsets = _functions(count)
    if native.lib is not None:
        result: Signature = native.lib.minhash(values, factors, offsets)
        return result
    return minima_twin(values, factors, offsets)


def minima_twin(values: Hashes, factors: Hashes, offsets: Hashes) -> Signature:
    smallest = np.full(factors.size, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK, None] * factors + offsets
        np.minimum(smallest, chunk.min(axis=0), out=smallest)
    # because: the top bits of a minimum are nearly always zero, and tell no two texts apart
    return (smallest >> np.uint64(16)).astype(np.uint16)


def similarity(first: Signature, second: Signature) -> npt.NDArray[np.float64]:
    """The estimated Jaccard similarity, row by row."""
    return np.asarray((first == second).mean(axis=1), np.float64)


def content_hash(text: str) -> bytes:
    """The same for texts that differ in case, in spaces and line breaks, or in how accents are composed."""
    plain = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    return hashlib.blake2b(plain.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Sign:
    """Every document's row, and its signature where near copies are wanted."""

    minhash: MinHash | None
    name: ClassVar[str] = "sign"

    @property
    def files(self) -> Sequence[str]:
        return ("rows", "signatures") if self.minhash else ("rows",)

    def run(self, documents: Documents, key: str, tally: Tally) -> dict[str, bytes]:
        rows: list[bytes] = []
        signatures: list[bytes] = []
        for position, document in documents:
            text = document[key]
            length = len(text) if self.minhash else 0
            if self.minhash:
                signature = self.minhash.signature(text)
                # because: a text without words has length 0 here, and copies.py passes over it
                length = length if signature is not None else 0
                blank = np.zeros(self.minhash.num_hashes, np.uint16)
                signatures.append((signature if signature is not None else blank).tobytes())
            rows.append(np.uint64(position).tobytes() + content_hash(text) + np.uint64(length).tobytes())
            tally.keep(text)
        return {"rows": b"".join(rows)} | ({"signatures": b"".join(signatures)} if self.minhash else {})


@dataclass(frozen=True)
class Drop(Selection):
    """Leaves out the documents whose positions stand in these files, which are sorted."""

    marks: tuple[tuple[str, Path], ...]  # (cause, file of positions)
    name: ClassVar[str] = "dedupe"

    def kept(self, documents: Documents, key: str, tally: Tally) -> Iterator[Document]:
        marked = [(cause, load_array(path, np.uint64)) for cause, path in self.marks]
        for position, document in documents:
            cause = next((cause for cause, positions in marked if _holds(positions, position)), None)
            if cause is None:
                yield document
            else:
                tally.drop(cause)


def _holds(positions: npt.NDArray[np.uint64], position: int) -> bool:
    at = int(np.searchsorted(positions, np.uint64(position)))
    return at < positions.size and int(positions[at]) == position


def load_array(path: Path, dtype: type) -> npt.NDArray[Any]:
    """A file of numbers as a view of the disk, so that its size does not matter."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise MissingInputError(f"{path} does not exist. Run the step before, with the same --work.") from error
    if size % np.dtype(dtype).itemsize:
        raise DataError(f"{path} has {size} bytes, which no whole number of entries. Remove it and run its step again.")
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)


def remember_inputs(work: Path, inputs: Inputs, minhash: MinHash | None) -> None:
    """Note what is being signed. Every task of an array writes the same, so that they cannot disagree."""
    write_json(work / "inputs.json", _facts(inputs, minhash))


def check_inputs(work: Path, inputs: Inputs) -> None:
    """Positions mean something only in the files they were taken from."""
    path = work / "inputs.json"
    if not path.exists():
        raise MissingInputError(f"{path} does not exist. Run `lmtrain corpus sign` first, with the same --work.")
    if read_json(path)["files"] != _facts(inputs, None)["files"]:
        raise DataError(f"{work} was made from other files than these. Give the same inputs, or sign them again.")


def _facts(inputs: Inputs, minhash: MinHash | None) -> dict[str, object]:
    files = [[str(source.path.resolve()), source.num_bytes, source.mtime_ns] for source in find_files(inputs)]
    shape = {"bands": minhash.bands, "rows": minhash.rows, "words": minhash.words} if minhash else None
    return {"files": files, "minhash": shape}


class Signed:
    """All that `Sign` wrote in a work folder, whatever parts it came in, as one table on disk."""

    def __init__(self, work: Path) -> None:
        names = sorted(name for name in (os.listdir(work) if work.is_dir() else []) if _PART.fullmatch(name))
        if not names:
            raise MissingInputError(f"{work} holds nothing signed. Run `lmtrain corpus sign` first, with this --work.")
        counts = {int(match[2] or 1) for name in names if (match := _PART.fullmatch(name))}
        if len(counts) > 1 or len(names) < max(counts):
            raise MissingInputError(f"{work} holds {len(names)} parts of {max(counts)}. Run the missing parts of sign.")
        shape = read_json(work / "inputs.json")["minhash"]
        self.minhash = MinHash(**shape) if shape else None
        self._rows = [load_array(work / name, np.uint64).reshape(-1, len(ROW_COLUMNS)) for name in names]
        width = self.minhash.num_hashes if self.minhash else 1
        signed = [work / name.replace("rows", "signatures").replace(".u64", ".u16") for name in names]
        self._signatures = [load_array(path, np.uint16).reshape(-1, width) for path in signed if self.minhash]
        self._starts = np.cumsum([0, *(len(rows) for rows in self._rows)])
        if not len(self):
            raise DataError(f"{work}: all parts together have signed no document. Check the files that were signed.")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, chunk: int = 1 << 18) -> Iterator[Rows]:
        for part in self._rows:
            for start in range(0, len(part), chunk):
                yield np.asarray(part[start : start + chunk])

    def signatures(self, chunk: int = 1 << 16) -> Iterator[tuple[int, Signature]]:
        """(index of the first, signatures), in order."""
        for base, part in zip(self._starts, self._signatures, strict=False):
            for start in range(0, len(part), chunk):
                yield int(base) + start, np.asarray(part[start : start + chunk])

    def rows_at(self, indices: npt.NDArray[np.int64]) -> Rows:
        return self._gather(self._rows, indices, np.uint64)

    def signatures_at(self, indices: npt.NDArray[np.int64]) -> Signature:
        return self._gather(self._signatures, indices, np.uint16)

    def _gather(self, parts: list[npt.NDArray[Any]], indices: npt.NDArray[np.int64], dtype: type) -> npt.NDArray[Any]:
        result: npt.NDArray[Any] = np.empty((indices.size, parts[0].shape[1]), dtype)
        owner = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(owner):
            chosen = owner == number
            result[chosen] = parts[number][indices[chosen] - self._starts[number]]
        return result
