"""Exact and near deduplication: documents are signed, copies are found by signature, and marked documents are dropped.

A work folder holds the results that tasks exchange: rows (position, 128-bit hash, length) and signatures from
`SignStep`, similar pairs, and the positions of copies, which `DropStep` reads. Called by the verbs of `lmtrain corpus`.

Exact: rows are sorted by hash; all but the first of a group are copies. Near: for every band the keys are sorted, and
documents with equal keys are compared by their whole signatures; pairs at or above the threshold are joined into
groups, and one document of each group stays. All sorting is on disk, so that memory is constant for any number of
documents.
"""

from __future__ import annotations

import hashlib
import json
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
from data_tools.corpus.flow.run_one_corpus_step_in_workers import Documents, SelectionStep, Tally, find_step_sources
from data_tools.corpus.flow.word_ngram_hashes import ODD, Hashes, mix, shingles
from data_tools.read.cut_files_into_chunks import WHOLE_PART, TaskPart
from data_tools.read.find_input_files import Inputs
from lmtrain.errors import DataError, MissingInputError, UsageError, example, own
from lmtrain.runtime import compiled_helpers
from lmtrain.runtime.files.atomic_files import atomic_file, open_output, read_json, storage_errors, write_json
from lmtrain.tokenizer.text_from_json_lines import Document

Signature = npt.NDArray[np.uint16]
ROW_COLUMNS = ("position", "hash_high", "hash_low", "length")
_PART = re.compile(r"rows\.part-(\d{5})-of-(\d{5})\.u64|rows\.u64")
_CHUNK = 512  # because: 512 x 256 x 8 bytes is 1 MB, which fits a core's cache
Indices = npt.NDArray[np.int64]
EXACT_FILE, NEAR_FILE = "exact.u64", "near.u64"
INPUTS_FILE = "inputs.json"
PAIRS_FILE = Path("pairs.u64")
KEEP = ("first", "longest")
_NUMBERS_AT_ONCE = 1 << 20
_PAIRS_AT_ONCE = 1 << 15  # because: the signatures of so many pairs take 32 MiB


@dataclass(frozen=True)
class MinHash:
    """Parameters of MinHash signatures.

    Two texts of Jaccard similarity s are compared with probability 1 - (1 - s^rows)^bands.
    """

    bands: int = 32
    rows: int = 8  # hash functions per band
    words: int = 5  # words in each hashed sequence

    @property
    def num_hashes(self) -> int:
        return self.bands * self.rows

    def signature(self, text: str) -> Signature | None:
        """Return the signature of a text, or None for a text without words, which is similar to no other text."""
        hashes = shingles(text, self.words)
        return min_hashes(hashes, self.num_hashes) if hashes.size else None

    def band_keys(self, signatures: Signature, band: int) -> Hashes:
        """Return a hash of one band of each signature. A signature is a row, a band is a range of its columns; equal
        keys mean that two documents agree in the whole band and may be near copies.
        """
        columns = signatures[:, band * self.rows : (band + 1) * self.rows].astype(np.uint64)
        keys = np.full(len(signatures), band, np.uint64)
        for column in columns.T:
            keys = mix(keys * ODD + column)
        return keys


@lru_cache(maxsize=4)
def _hash_functions(count: int) -> tuple[Hashes, Hashes]:
    """Return the factors (odd numbers) and the offsets of `count` hash functions x -> factor * x + offset. They are the
    same in every version and on every machine.
    """
    numbers = mix(np.arange(1, 2 * count + 1, dtype=np.uint64) * ODD)
    return numbers[:count] | np.uint64(1), numbers[count:]


def min_hashes(values: Hashes, count: int) -> Signature:
    """Return, for each of `count` hash functions, bits 16 to 31 of its minimum over the values."""
    return compiled_helpers.compiled("minhash", min_hashes_twin)(values, *_hash_functions(count))


def min_hashes_twin(values: Hashes, factors: Hashes, offsets: Hashes) -> Signature:
    """Return, for each hash function i (x -> factors[i] * x + offsets[i]), bits 16 to 31 of its minimum over the
    values. Used where the compiled extension is missing.
    """
    smallest = np.full(factors.size, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK, None] * factors + offsets
        np.minimum(smallest, chunk.min(axis=0), out=smallest)
    # because: the top bits of a minimum are nearly always zero and distinguish no texts
    return (smallest >> np.uint64(16)).astype(np.uint16)


def similarity(first: Signature, second: Signature) -> npt.NDArray[np.float64]:
    """Return the estimated Jaccard similarity of the texts in each row: first[i] and second[i]."""
    return np.asarray((first == second).mean(axis=1), np.float64)


def content_hash(text: str) -> bytes:
    """Return a 128-bit hash of a text that ignores case, white space and the composition of accents."""
    normalized = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    return hashlib.blake2b(normalized.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class SignStep:
    """The step `sign`: writes every document's position, hash and length, and its MinHash signature if near copies are
    wanted.
    """

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
class DropStep(SelectionStep):
    """The step `dedupe`: drops the documents whose positions are in sorted files of positions."""

    marks: tuple[tuple[str, Path], ...]  # (cause for the report, file of positions)
    name: ClassVar[str] = "dedupe"

    def select_documents(self, documents: Documents, key: str, tally: Tally) -> Iterator[Document]:
        marked = [(cause, load_array(path, np.uint64)) for cause, path in self.marks]
        for position, document in documents:
            cause = next((cause for cause, positions in marked if _contains(positions, position)), None)
            if cause is None:
                yield document
            else:
                tally.drop(cause)


def _contains(positions: npt.NDArray[np.uint64], position: int) -> bool:
    """Return True if `positions`, which are sorted, contain `position`."""
    at = int(np.searchsorted(positions, np.uint64(position)))
    return at < positions.size and int(positions[at]) == position


def load_array(path: Path, dtype: type) -> npt.NDArray[Any]:
    """Map a file of numbers into memory as a read-only array. Raise MissingInputError if the file is missing, DataError
    if its size is no multiple of the number's size.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise MissingInputError(
            f"{path} does not exist. First run the step that writes it, with the same --work."
        ) from error
    if size % np.dtype(dtype).itemsize:
        raise DataError(f"{path} has {size} bytes, not a whole number of entries. Remove it and run its step again.")
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)


def record_inputs(folder: Path, inputs: Inputs, minhash: MinHash | None) -> None:
    """Record the input files and the parameters of the signatures in the work folder. All tasks of an array write the
    same.
    """
    write_json(folder / INPUTS_FILE, _input_facts(inputs, minhash))


def has_inputs(folder: Path, inputs: Inputs, minhash: MinHash | None) -> bool:
    """Return whether the work folder records these input files, unchanged since then, and parameters."""
    path = folder / INPUTS_FILE
    return path.exists() and read_json(path) == json.loads(json.dumps(_input_facts(inputs, minhash)))


def check_inputs(folder: Path, inputs: Inputs) -> None:
    """Raise DataError unless `inputs` are the files, unchanged since then, for which `lmtrain corpus sign` made the
    work folder `folder`; MissingInputError if it made none. The folder refers to documents by their positions in these
    files.
    """
    path = folder / INPUTS_FILE
    if not path.exists():
        raise MissingInputError(f"{path} does not exist. Run `lmtrain corpus sign` first, with the same --work.")
    if read_json(path)["files"] != _input_facts(inputs, None)["files"]:
        raise DataError(
            f"{folder} holds signatures of other input files. Give those files, or run `lmtrain corpus sign` again."
        )


def _input_facts(inputs: Inputs, minhash: MinHash | None) -> dict[str, object]:
    """Return the content of inputs.json: path, size and time of each input file, and the parameters of the signatures.
    """
    files = [[str(source.path.resolve()), source.num_bytes, source.mtime_ns] for source in find_step_sources(inputs)]
    return {"files": files, "minhash": vars(minhash) if minhash else None}


class SignedDocuments:
    """Output of `SignStep` in a work folder: the rows and signatures of all parts as one table on disk."""

    def __init__(self, folder: Path) -> None:
        row_files = sorted(name for name in (os.listdir(folder) if folder.is_dir() else []) if _PART.fullmatch(name))
        if not row_files:
            raise MissingInputError(f"{folder} has no signatures. Run `lmtrain corpus sign` first, with this --work.")
        counts = {int(match[2] or 1) for name in row_files if (match := _PART.fullmatch(name))}
        if len(counts) > 1 or len(row_files) < max(counts):
            raise MissingInputError(
                f"{folder} has {len(row_files)} of {max(counts)} parts. Run the missing parts of `lmtrain corpus sign`."
            )
        shape = read_json(folder / INPUTS_FILE)["minhash"]
        self.minhash = MinHash(**shape) if shape else None
        self._rows = [load_array(folder / name, np.uint64).reshape(-1, len(ROW_COLUMNS)) for name in row_files]
        width = self.minhash.num_hashes if self.minhash else 1
        signature_files = [folder / name.replace("rows", "signatures").replace(".u64", ".u16") for name in row_files]
        self._signatures = [load_array(path, np.uint16).reshape(-1, width) for path in signature_files if self.minhash]
        self._starts = np.cumsum([0, *(len(rows) for rows in self._rows)])
        if not len(self):
            raise DataError(f"{folder} holds no signature of any document. Check the files that were signed.")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, chunk: int = 1 << 18) -> Iterator[Rows]:
        """Yield the rows of all documents in order, as arrays of at most `chunk` rows. Columns are position, upper and
        lower half of the hash, and length.
        """
        for part in self._rows:
            for start in range(0, len(part), chunk):
                yield np.asarray(part[start : start + chunk])

    def signatures(self, chunk: int = 1 << 16) -> Iterator[tuple[int, Signature]]:
        """Yield (index of the first document, signatures) of consecutive documents, at most `chunk` at a time."""
        for base, part in zip(self._starts, self._signatures, strict=False):
            for start in range(0, len(part), chunk):
                yield int(base) + start, np.asarray(part[start : start + chunk])

    def rows_at(self, indices: npt.NDArray[np.int64]) -> Rows:
        """Return the rows with these indices."""
        return self._gather(self._rows, indices, np.uint64)

    def signatures_at(self, indices: npt.NDArray[np.int64]) -> Signature:
        """Return the signatures with these indices."""
        return self._gather(self._signatures, indices, np.uint16)

    def _gather(self, parts: list[npt.NDArray[Any]], indices: npt.NDArray[np.int64], dtype: type) -> npt.NDArray[Any]:
        result: npt.NDArray[Any] = np.empty((indices.size, parts[0].shape[1]), dtype)
        owner = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(owner):
            chosen = owner == number
            result[chosen] = parts[number][indices[chosen] - self._starts[number]]
        return result


def mark_exact(folder: Path, memory_bytes: int = MEMORY_BYTES) -> int:
    """Find exact copies among the documents whose hashes are in a work folder: of each group of equal documents, all
    but the first. Write the copies' positions to exact.u64 in the folder and return their number.
    """
    signed = SignedDocuments(folder)
    (folder / NEAR_FILE).unlink(missing_ok=True)  # because: near copies were found relative to earlier exact copies
    with Sorter(3, folder, memory_bytes) as by_hash, Sorter(1, folder, memory_bytes) as copies:
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
        return _write_positions(folder / EXACT_FILE, copies.batches())


def _write_positions(path: Path, batches: Iterator[Rows]) -> int:
    """Write arrays of document positions (unsigned 64-bit numbers) to one binary file, and return how many positions
    were written.
    """
    count = 0
    with atomic_file(path) as file:
        for batch in batches:
            file.write(batch.tobytes())
            count += len(batch)
    return count


def find_pairs(folder: Path, threshold: float, part: TaskPart = WHOLE_PART, memory_bytes: int = MEMORY_BYTES) -> int:
    """Write to the work folder the pairs of documents whose MinHash signatures agree in at least one band and give an
    estimated Jaccard similarity of at least `threshold`. Return the number of pairs. `part` is this task of a job
    array, which compares only its share of the bands.
    """
    if not 0 < threshold <= 1:
        raise UsageError(
            f"--threshold={threshold} must be above 0 and at most 1. Give a similarity such as {example(0.8)}."
        )
    signed = SignedDocuments(folder)
    if signed.minhash is None:
        raise UsageError(f"{folder} was signed with --exact-only. To find near copies, sign it again without that.")
    is_candidate = _can_be_near_copies(folder, signed)
    count = 0
    with Sorter(2, folder, memory_bytes) as candidates:
        for band in range(*part.share_of(signed.minhash.bands)):
            for pairs in _pairs_sharing_band(signed, band, is_candidate, folder, memory_bytes):
                candidates.add(pairs)
        with atomic_file(folder / part.output_path(PAIRS_FILE)) as file:
            for pairs in candidates.distinct():
                for similar in _similar_pairs(signed, pairs, threshold):
                    file.write(similar.tobytes())
                    count += len(similar)
    return count


def _can_be_near_copies(folder: Path, signed: SignedDocuments) -> npt.NDArray[np.bool_]:
    """Return a mask of the documents to compare for near copies: those that have words and are not already marked as
    exact copies.
    """
    exact = load_array(folder / EXACT_FILE, np.uint64)
    result = np.empty(len(signed), bool)
    start = 0
    for rows in signed.rows():
        at = np.searchsorted(exact, rows[:, 0])
        is_copy = at < exact.size
        is_copy[is_copy] = exact[at[is_copy]] == rows[is_copy, 0]
        result[start : start + len(rows)] = (rows[:, 3] > 0) & ~is_copy
        start += len(rows)
    return result


def _pairs_sharing_band(
    signed: SignedDocuments, band: int, is_candidate: npt.NDArray[np.bool_], folder: Path, memory_bytes: int
) -> Iterator[Rows]:
    """Yield arrays of document pairs (smaller index, larger index) that agree in one band of their signatures.
    `is_candidate` masks the documents to compare; `folder` is for temporary files.

    Each document is paired with the first and the previous document of its group.
    """
    assert signed.minhash is not None
    with Sorter(2, folder, memory_bytes // 2) as by_key:
        for base, signatures in signed.signatures():
            indices = np.flatnonzero(is_candidate[base : base + len(signatures)])
            keys = signed.minhash.band_keys(signatures[indices], band)
            by_key.add(np.stack([keys, (indices + base).astype(np.uint64)], axis=1))
        first = np.empty((0, 2), np.uint64)  # first row of the group at the end of the last batch
        last = np.empty((0, 2), np.uint64)
        for batch in by_key.batches():
            rows = np.concatenate([first, last, batch])  # rows of a group that spans batches stay adjacent
            firsts = _first_of_groups(rows[:, 0])
            leader, follows = rows[firsts], firsts < np.arange(len(rows))
            pairs = np.concatenate([
                np.stack([partner[follows, 1], rows[follows, 1]], 1) for partner in (leader, np.roll(rows, 1, axis=0))
            ])
            yield np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
            first, last = leader[-1:], rows[-1:]


def _first_of_groups(keys: Hashes) -> Indices:
    """Return, for each entry of `keys`, the index of the first entry in its run of equal consecutive keys."""
    starts = np.ones(len(keys), bool)
    starts[1:] = keys[1:] != keys[:-1]
    return np.maximum.accumulate(np.where(starts, np.arange(len(keys)), 0))


def _similar_pairs(signed: SignedDocuments, pairs: Rows, threshold: float) -> Iterator[Rows]:
    """Yield, in chunks, the pairs whose estimated Jaccard similarity is at least `threshold`."""
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        chunk = pairs[start : start + _PAIRS_AT_ONCE]
        first, second = (signed.signatures_at(chunk[:, side].astype(np.int64)) for side in (0, 1))
        yield chunk[similarity(first, second) >= threshold]


def mark_near(folder: Path, keep: str, num_parts: int = 1, memory_bytes: int = MEMORY_BYTES) -> int:
    """Find near copies by joining the pairs from all parts of `find_pairs` into groups. Write the positions of all
    documents to drop to near.u64 and return their number. Of each group one document is kept: the "first" or the
    "longest", as `keep` says.
    """
    if keep not in KEEP:
        raise UsageError(f"--keep={keep} is unknown. Use {' or '.join(map(own, KEEP))}.")
    signed = SignedDocuments(folder)
    paths = [folder / TaskPart(number, num_parts).output_path(PAIRS_FILE) for number in range(num_parts)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise MissingInputError(f"{folder} lacks {', '.join(missing)}. First write them with `lmtrain corpus match`.")
    parent = _create_parents(folder / ".groups.i64", len(signed))
    try:
        for pairs in _read_pairs(paths):
            join_groups(parent, pairs[:, 0], pairs[:, 1])
        with Sorter(3, folder, memory_bytes) as group_rows, Sorter(1, folder, memory_bytes) as copies:
            for pairs in _read_pairs(paths):
                group_rows.add(_rows_of_groups(signed, parent, np.unique(pairs), keep))
            _add_copies(group_rows, signed, copies)
            return _write_positions(folder / NEAR_FILE, copies.distinct())
    finally:
        del parent
        (folder / ".groups.i64").unlink(missing_ok=True)


def _create_parents(path: Path, length: int) -> Indices:
    """Create a union-find array of `length` entries on disk, in which every index is its own parent. Return it as a
    memory map.

    The file is written by ordinary writes, because a full disk kills a process that writes to a memory map.
    """
    with storage_errors(path, "Writing"):
        with open(open_output(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "wb") as file:
            for start in range(0, length, _NUMBERS_AT_ONCE):
                file.write(np.arange(start, min(start + _NUMBERS_AT_ONCE, length)).tobytes())
        return np.memmap(path, np.int64, "r+")


def _read_pairs(paths: list[Path], chunk: int = 1 << 20) -> Iterator[Indices]:
    """Yield the pairs of document indices in these files, as arrays of at most `chunk` rows."""
    for path in paths:
        pairs = load_array(path, np.uint64).reshape(-1, 2)
        for start in range(0, len(pairs), chunk):
            yield pairs[start : start + chunk].astype(np.int64)


def join_groups(parent: Indices, first: Indices, second: Indices) -> None:
    """Join the groups of first[i] and second[i] for every i, in the union-find array `parent`. The root of a group is
    its smallest index.
    """
    while first.size:
        first_roots, second_roots = find_roots(parent, first), find_roots(parent, second)
        is_apart = first_roots != second_roots
        first, second = first[is_apart], second[is_apart]
        first_roots, second_roots = first_roots[is_apart], second_roots[is_apart]
        # because: a root always gets a smaller parent (the smallest of several), so no cycle can form
        np.minimum.at(parent, np.maximum(first_roots, second_roots), np.minimum(first_roots, second_roots))


def find_roots(parent: Indices, nodes: Indices) -> Indices:
    """Return the root of each node's group in the union-find array `parent`, and shorten the paths to the roots."""
    roots = parent[nodes]
    while ((parents := parent[roots]) != roots).any():
        parent[roots] = parent[parents]  # halve the paths
        roots = parents
    parent[nodes] = roots  # the next search from these nodes takes one step
    return roots


def _rows_of_groups(signed: SignedDocuments, parent: Indices, indices: Indices, keep: str) -> Rows:
    """Return a row (group, sort key, document index) for each of the documents `indices`; `parent` is the union-find
    array of groups. Sort keys are such that the smallest row of a group is the document to keep: the longest one if
    `keep` is "longest", else the first one.
    """
    roots = find_roots(parent, indices).astype(np.uint64)
    sort_key = ~signed.rows_at(indices)[:, 3] if keep == "longest" else np.zeros(indices.size, np.uint64)
    return np.stack([roots, sort_key, indices.astype(np.uint64)], axis=1)


def _add_copies(group_rows: Sorter, signed: SignedDocuments, copies: Sorter) -> None:
    """Add the positions of the documents to drop to `copies`: all documents of a group except the first. `group_rows`
    holds the rows (group, sort key, document index).
    """
    group, kept = np.empty(0, np.uint64), np.empty(0, np.uint64)  # group, kept document at the last batch's end
    for batch in group_rows.batches():
        roots = np.concatenate([group, batch[:, 0]])
        indices = np.concatenate([kept, batch[:, 2]])
        leader = indices[_first_of_groups(roots)]
        copies.add(signed.rows_at(indices[indices != leader].astype(np.int64))[:, :1])
        group, kept = roots[-1:], leader[-1:]
