"""Exact and near deduplication: documents are signed, copies are found by signature, and marked documents are dropped.

A work folder holds the results that tasks exchange: rows (position, 128-bit hash, length) and signatures from `Sign`,
similar pairs, and the positions of copies, which `Drop` reads. Called by the verbs of `lmtrain corpus`.

Exact: rows are sorted by hash; all but the first of a group are copies. Near: for every band the keys are sorted, and
documents with equal keys are compared by their whole signatures; pairs at or above the threshold are joined into
groups, and one document of each group stays. All sorting is on disk, so that memory is constant for any number of
documents.
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

from data_tools.corpus.flow.external_sort import MEMORY_BYTES, Rows, Sorter
from data_tools.corpus.flow.steps import Documents, Selection, Tally, find_files
from data_tools.corpus.flow.word_hashes import Hashes, mix, shingles
from data_tools.read.chunks import WHOLE_PART, Part
from data_tools.read.sources import Inputs
from lmtrain import native
from lmtrain.errors import DataError, MissingInputError, UsageError
from lmtrain.runtime.files.files import atomic_file, open_output, read_json, storage_errors, write_json
from lmtrain.tokenizer.json_lines import Document

Signature = npt.NDArray[np.uint16]
ROW_COLUMNS = ("position", "hash_high", "hash_low", "length")
_PART = re.compile(r"rows\.part-(\d{5})-of-(\d{5})\.u64|rows\.u64")
_CHUNK = 512  # because: 512 x 256 x 8 bytes is 1 MB, which fits a core's cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
Indices = npt.NDArray[np.int64]
EXACT, NEAR = "exact.u64", "near.u64"
PAIRS = Path("pairs.u64")
KEEP = ("first", "longest")
_AT_ONCE = 1 << 20
_PAIRS_AT_ONCE = 1 << 15  # because: the signatures of so many pairs take 32 MiB


@dataclass(frozen=True)
class MinHash:
    """Shape of a signature. Two texts of similarity s become candidates with probability 1 - (1 - s^rows)^bands."""

    bands: int = 32
    rows: int = 8
    words: int = 5

    @property
    def num_hashes(self) -> int:
        return self.bands * self.rows

    def signature(self, text: str) -> Signature | None:
        """Return the signature of a text, or None for a text without words, which is similar to no other text."""
        found = shingles(text, self.words)
        return minima(found, self.num_hashes) if found.size else None

    def band_keys(self, signatures: Signature, band: int) -> Hashes:
        """Return one key per row of signatures; rows whose band is equal have equal keys."""
        columns = signatures[:, band * self.rows : (band + 1) * self.rows].astype(np.uint64)
        keys = np.full(len(signatures), band, np.uint64)
        for column in columns.T:
            keys = mix(keys * _GOLDEN + column)
        return keys


@lru_cache(maxsize=4)
def _functions(count: int) -> tuple[Hashes, Hashes]:
    """Return `count` odd factors and offsets of hash functions; constant over versions and machines."""
    numbers = mix(np.arange(1, 2 * count + 1, dtype=np.uint64) * _GOLDEN)
    return numbers[:count] | np.uint64(1), numbers[count:]


def minima(values: Hashes, count: int) -> Signature:
    """Return, per function a*x + b, its minimum over the values, reduced to the bits 16 to 31."""
    return native.compiled("minhash", minima_twin)(values, *_functions(count))


def minima_twin(values: Hashes, factors: Hashes, offsets: Hashes) -> Signature:
    smallest = np.full(factors.size, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK, None] * factors + offsets
        np.minimum(smallest, chunk.min(axis=0), out=smallest)
    # because: the top bits of a minimum are nearly always zero and distinguish no texts
    return (smallest >> np.uint64(16)).astype(np.uint16)


def similarity(first: Signature, second: Signature) -> npt.NDArray[np.float64]:
    """Return the estimated Jaccard similarity of each row pair."""
    return np.asarray((first == second).mean(axis=1), np.float64)


def content_hash(text: str) -> bytes:
    """Return a hash that ignores case, white space and the composition of accents."""
    plain = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    return hashlib.blake2b(plain.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Sign:
    """The step `sign`: writes every document's row, and its signature if near copies are wanted."""

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
            length = 0
            if self.minhash:
                signature = self.minhash.signature(text)
                # because: length 0 marks a text without words, which the search for near copies skips
                length = 0 if signature is None else len(text)
                blank = np.zeros(self.minhash.num_hashes, np.uint16)
                signatures.append((blank if signature is None else signature).tobytes())
            rows.append(np.uint64(position).tobytes() + content_hash(text) + np.uint64(length).tobytes())
            tally.keep(text)
        return {"rows": b"".join(rows)} | ({"signatures": b"".join(signatures)} if self.minhash else {})


@dataclass(frozen=True)
class Drop(Selection):
    """The step `dedupe`: drops the documents whose positions are in sorted files of positions."""

    marks: tuple[tuple[str, Path], ...]  # (cause for the report, file of positions)
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
    """Map a file of numbers into memory. Raise MissingInputError if it is missing, DataError if its size is wrong."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise MissingInputError(f"{path} does not exist. Run the step before, with the same --work.") from error
    if size % np.dtype(dtype).itemsize:
        raise DataError(f"{path} has {size} bytes, which no whole number of entries. Remove it and run its step again.")
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)


def remember_inputs(work: Path, inputs: Inputs, minhash: MinHash | None) -> None:
    """Record the input files and the signature's shape. All tasks of an array write the same content."""
    write_json(work / "inputs.json", _facts(inputs, minhash))


def check_inputs(work: Path, inputs: Inputs) -> None:
    """Raise unless these input files are the signed ones: positions are valid only for the same files."""
    path = work / "inputs.json"
    if not path.exists():
        raise MissingInputError(f"{path} does not exist. Run `lmtrain corpus sign` first, with the same --work.")
    if read_json(path)["files"] != _facts(inputs, None)["files"]:
        raise DataError(f"{work} was made from other files than these. Give the same inputs, or sign them again.")


def _facts(inputs: Inputs, minhash: MinHash | None) -> dict[str, object]:
    files = [[str(source.path.resolve()), source.num_bytes, source.mtime_ns] for source in find_files(inputs)]
    return {"files": files, "minhash": vars(minhash) if minhash else None}


class Signed:
    """Output of `Sign` in a work folder: the rows and signatures of all parts as one table on disk."""

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
        """Yield (index of the first, signatures) of chunks, in order."""
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


def mark_exact(work: Path, memory_bytes: int = MEMORY_BYTES) -> int:
    """Write the positions of all exact copies but the first of each group; return their number."""
    signed = Signed(work)
    (work / NEAR).unlink(missing_ok=True)  # because: near copies were found relative to earlier exact copies
    with Sorter(3, work, memory_bytes) as by_hash, Sorter(1, work, memory_bytes) as copies:
        for rows in signed.rows():
            by_hash.add(rows[:, [1, 2, 0]])
        last = np.empty((0, 2), np.uint64)
        for batch in by_hash.batches():
            hashes = np.concatenate([last, batch[:, :2]])
            repeats = (hashes[1:] == hashes[:-1]).all(axis=1)
            if not len(last):  # the very first row has no predecessor
                repeats = np.concatenate([[False], repeats])
            copies.add(batch[repeats, 2:])
            last = batch[-1:, :2]
        return _write(work / EXACT, copies.batches())


def _write(path: Path, batches: Iterator[Rows]) -> int:
    count = 0
    with atomic_file(path) as file:
        for batch in batches:
            file.write(batch.tobytes())
            count += len(batch)
    return count


def find_pairs(work: Path, threshold: float, part: Part = WHOLE_PART, memory_bytes: int = MEMORY_BYTES) -> int:
    """Write the index pairs that share a band of this part and are at least `threshold` similar; return the count."""
    if not 0 < threshold <= 1:
        raise UsageError(f"--threshold={threshold} is not a similarity. Give a number above 0, up to 1, such as 0.8.")
    signed = Signed(work)
    if signed.minhash is None:
        raise UsageError(f"{work} was signed with --exact-only. Sign it again without it to find near copies.")
    wanted = _wanted(work, signed)
    count = 0
    with Sorter(2, work, memory_bytes) as candidates:
        for band in range(*part.share_of(signed.minhash.bands)):
            for pairs in _sharing(signed, band, wanted, work, memory_bytes):
                candidates.add(pairs)
        with atomic_file(work / part.output_path(PAIRS)) as file:
            for pairs in candidates.distinct():
                for alike in _alike(signed, pairs, threshold):
                    file.write(alike.tobytes())
                    count += len(alike)
    return count


def _wanted(work: Path, signed: Signed) -> npt.NDArray[np.bool_]:
    """Return a mask of documents that can be near copies: they have words and are no exact copies."""
    exact = load_array(work / EXACT, np.uint64)
    result = np.empty(len(signed), bool)
    start = 0
    for rows in signed.rows():
        at = np.searchsorted(exact, rows[:, 0])
        copy = at < exact.size
        copy[copy] = exact[at[copy]] == rows[copy, 0]
        result[start : start + len(rows)] = (rows[:, 3] > 0) & ~copy
        start += len(rows)
    return result


def _sharing(
    signed: Signed, band: int, wanted: npt.NDArray[np.bool_], work: Path, memory_bytes: int
) -> Iterator[Rows]:
    """Yield pairs (smaller index, larger index) with equal keys: each row with its group's first and previous row."""
    assert signed.minhash is not None
    with Sorter(2, work, memory_bytes // 2) as by_key:
        for base, signatures in signed.signatures():
            chosen = np.flatnonzero(wanted[base : base + len(signatures)])
            keys = signed.minhash.band_keys(signatures[chosen], band)
            by_key.add(np.stack([keys, (chosen + base).astype(np.uint64)], axis=1))
        first = np.empty((0, 2), np.uint64)  # first row of the group at the end of the last batch
        last = np.empty((0, 2), np.uint64)
        for batch in by_key.batches():
            rows = np.concatenate([first, last, batch])  # rows of a group that spans batches stay adjacent
            starts = np.ones(len(rows), bool)
            starts[1:] = rows[1:, 0] != rows[:-1, 0]
            leader = rows[np.maximum.accumulate(np.where(starts, np.arange(len(rows)), 0))]
            pairs = np.concatenate([
                np.stack([other[~starts, 1], rows[~starts, 1]], 1) for other in (leader, np.roll(rows, 1, axis=0))
            ])
            yield np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
            first, last = leader[-1:], rows[-1:]


def _alike(signed: Signed, pairs: Rows, threshold: float) -> Iterator[Rows]:
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        some = pairs[start : start + _PAIRS_AT_ONCE]
        left, right = (signed.signatures_at(some[:, side].astype(np.int64)) for side in (0, 1))
        yield some[similarity(left, right) >= threshold]


def mark_near(work: Path, keep: str, num_parts: int = 1, memory_bytes: int = MEMORY_BYTES) -> int:
    """Join the pairs of all parts into groups; write the positions of all but one document per group.

    Return the number of positions. `keep` decides which document stays: first or longest.
    """
    if keep not in KEEP:
        raise UsageError(f"--keep={keep} is no rule. Use {' or '.join(KEEP)}.")
    signed = Signed(work)
    paths = [work / Part(number, num_parts).output_path(PAIRS) for number in range(num_parts)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise MissingInputError(f"{work} lacks {', '.join(missing)}. Run those parts of `lmtrain corpus match` first.")
    parent = _mapped(work / ".groups.i64", len(signed))
    try:
        for pairs in _pairs_of(paths):
            unite(parent, pairs[:, 0], pairs[:, 1])
        with Sorter(3, work, memory_bytes) as members, Sorter(1, work, memory_bytes) as copies:
            for pairs in _pairs_of(paths):
                members.add(_members(signed, parent, np.unique(pairs), keep))
            _copies_of(members, signed, copies)
            return _write(work / NEAR, copies.distinct())
    finally:
        del parent
        (work / ".groups.i64").unlink(missing_ok=True)


def _mapped(path: Path, length: int) -> Indices:
    """Return a memory-mapped file with 0, 1, 2, ...

    The file is written by ordinary writes, because a full disk kills a process that writes to a memory map.
    """
    with storage_errors(path, "Writing"):
        with open(open_output(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "wb") as file:
            for start in range(0, length, _AT_ONCE):
                file.write(np.arange(start, min(start + _AT_ONCE, length)).tobytes())
        return np.memmap(path, np.int64, "r+")


def _pairs_of(paths: list[Path], chunk: int = 1 << 20) -> Iterator[Indices]:
    for path in paths:
        pairs = load_array(path, np.uint64).reshape(-1, 2)
        for start in range(0, len(pairs), chunk):
            yield pairs[start : start + chunk].astype(np.int64)


def unite(parent: Indices, first: Indices, second: Indices) -> None:
    """Join groups in the union-find array: first[i] and second[i] then share a root, the group's smallest index."""
    while first.size:
        left, right = find_roots(parent, first), find_roots(parent, second)
        apart = left != right
        first, second, left, right = first[apart], second[apart], left[apart], right[apart]
        # because: a root always gets a smaller parent (the smallest of several), so no cycle can form
        np.minimum.at(parent, np.maximum(left, right), np.minimum(left, right))


def find_roots(parent: Indices, nodes: Indices) -> Indices:
    roots = parent[nodes]
    while ((above := parent[roots]) != roots).any():
        parent[roots] = parent[above]  # halve the paths
        roots = above
    parent[nodes] = roots  # the next search from these nodes takes one step
    return roots


def _members(signed: Signed, parent: Indices, indices: Indices, keep: str) -> Rows:
    """Return rows (group, rank, index); the first row of a group, in sorted order, is the document that stays."""
    roots = find_roots(parent, indices).astype(np.uint64)
    rank = ~signed.rows_at(indices)[:, 3] if keep == "longest" else np.zeros(indices.size, np.uint64)
    return np.stack([roots, rank, indices.astype(np.uint64)], axis=1)


def _copies_of(members: Sorter, signed: Signed, copies: Sorter) -> None:
    group, stays = np.empty(0, np.uint64), np.empty(0, np.uint64)  # group, kept document at the last batch's end
    for batch in members.batches():
        roots = np.concatenate([group, batch[:, 0]])
        indices = np.concatenate([stays, batch[:, 2]])
        starts = np.ones(len(roots), bool)
        starts[1:] = roots[1:] != roots[:-1]
        leader = indices[np.maximum.accumulate(np.where(starts, np.arange(len(roots)), 0))]
        copies.add(signed.rows_at(indices[indices != leader].astype(np.int64))[:, :1])
        group, stays = roots[-1:], leader[-1:]
