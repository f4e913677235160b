"""Exact and near copies, middle part: which of the signed documents are copies of which. Called by `lmtrain corpus`.

Exact: rows sorted by hash; all but the first of a group are copies. Near: for every band the keys are sorted, and
those that share one are compared by their whole signatures; pairs at or above the threshold are joined into groups,
and one document of each stays. Everything is sorted on disk, so that memory stays the same at any number of documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_tools.corpus.copies.signatures import Signed, load_array, similarity
from data_tools.corpus.flow.external_sort import MEMORY_BYTES, Rows, Sorter
from data_tools.read.parts import WHOLE, Part
from lmtrain.errors import MissingInputError, UsageError
from lmtrain.runtime.files.files import atomic_file, open_output, storage_errors

Indices = npt.NDArray[np.int64]
EXACT, NEAR = "exact.u64", "near.u64"
PAIRS = Path("pairs.u64")
KEEP = ("first", "longest")
_AT_ONCE = 1 << 20
_PAIRS_AT_ONCE = 1 << 15  # because: their signatures are 32 MiB


def mark_exact(work: Path, memory_bytes: int = MEMORY_BYTES) -> int:
    """Write the positions of every exact copy but the first; returns how many there are."""
    signed = Signed(work)
    (work / NEAR).unlink(missing_ok=True)  # what follows from other exact copies
    with Sorter(3, work, memory_bytes) as by_hash, Sorter(1, work, memory_bytes) as copies:
        for rows in signed.rows():
            by_hash.add(rows[:, [1, 2, 0]])
        last = np.empty((0, 2), np.uint64)
        for batch in by_hash.batches():
            hashes = np.concatenate([last, batch[:, :2]])
            repeats = (hashes[1:] == hashes[:-1]).all(axis=1)
            if not len(last):  # the very first row has none before it
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


def find_pairs(work: Path, threshold: float, part: Part = WHOLE, memory_bytes: int = MEMORY_BYTES) -> int:
    """Write the pairs (by index) at least `threshold` similar that share one of this part's bands."""
    if not 0 < threshold <= 1:
        raise UsageError(f"--threshold={threshold} is not a similarity. Give a number above 0, up to 1, such as 0.8.")
    signed = Signed(work)
    if signed.minhash is None:
        raise UsageError(f"{work} was signed with --exact-only. Sign it again without it to find near copies.")
    wanted = _wanted(work, signed)
    count = 0
    with Sorter(2, work, memory_bytes) as candidates:
        for band in range(*part.range(signed.minhash.bands)):
            for pairs in _sharing(signed, band, wanted, work, memory_bytes):
                candidates.add(pairs)
        with atomic_file(work / part.name(PAIRS)) as file:
            for pairs in candidates.distinct():
                for alike in _alike(signed, pairs, threshold):
                    file.write(alike.tobytes())
                    count += len(alike)
    return count


def _wanted(work: Path, signed: Signed) -> npt.NDArray[np.bool_]:
    """Documents that can be near copies: those with words, the first of each group of exact copies."""
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
    """Pairs (smaller index, larger index) with an equal key: each with the group's first and with the one before."""
    assert signed.minhash is not None
    with Sorter(2, work, memory_bytes // 2) as by_key:
        for base, signatures in signed.signatures():
            chosen = np.flatnonzero(wanted[base : base + len(signatures)])
            keys = signed.minhash.band_keys(signatures[chosen], band)
            by_key.add(np.stack([keys, (chosen + base).astype(np.uint64)], axis=1))
        first = np.empty((0, 2), np.uint64)  # the first row of the group that the last batch ended in
        last = np.empty((0, 2), np.uint64)
        for batch in by_key.batches():
            rows = np.concatenate([first, last, batch])  # neighbours in the group stay neighbours
            starts = np.ones(len(rows), bool)
            starts[1:] = rows[1:, 0] != rows[:-1, 0]
            leader = rows[np.maximum.accumulate(np.where(starts, np.arange(len(rows)), 0))]
            others = (leader, np.roll(rows, 1, axis=0))
            pairs = np.concatenate([np.stack([other[~starts, 1], rows[~starts, 1]], 1) for other in others])
            yield np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
            first, last = leader[-1:], rows[-1:]


def _alike(signed: Signed, pairs: Rows, threshold: float) -> Iterator[Rows]:
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        some = pairs[start : start + _PAIRS_AT_ONCE]
        left, right = (signed.signatures_at(some[:, side].astype(np.int64)) for side in (0, 1))
        yield some[similarity(left, right) >= threshold]


def mark_near(work: Path, keep: str, num_parts: int = 1, memory_bytes: int = MEMORY_BYTES) -> int:
    """Join the pairs of all parts into groups, and write the positions of all but one document of each."""
    if keep not in KEEP:
        raise UsageError(f"--keep={keep} is no rule. Use {' or '.join(KEEP)}.")
    signed = Signed(work)
    paths = [work / Part(number, num_parts).name(PAIRS) for number in range(num_parts)]
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
    """0, 1, 2, ... in memory that is a file's. Written in the common way, for a full disk ends who writes to a map."""
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
    """Union-find over whole arrays: afterwards first[i] and second[i] have one root, the smallest index of a group."""
    while first.size:
        left, right = find_roots(parent, first), find_roots(parent, second)
        apart = left != right
        first, second, left, right = first[apart], second[apart], left[apart], right[apart]
        # a root gets a smaller parent, so that no ring can form; of several offers the smallest wins
        np.minimum.at(parent, np.maximum(left, right), np.minimum(left, right))


def find_roots(parent: Indices, nodes: Indices) -> Indices:
    roots = parent[nodes]
    while ((above := parent[roots]) != roots).any():
        parent[roots] = parent[above]  # paths become half as long on the way
        roots = above
    parent[nodes] = roots  # the next search from here is one step
    return roots


def _members(signed: Signed, parent: Indices, indices: Indices, keep: str) -> Rows:
    """(group, rank, index): the one that sorts first in its group is the one that stays."""
    roots = find_roots(parent, indices).astype(np.uint64)
    rank = ~signed.rows_at(indices)[:, 3] if keep == "longest" else np.zeros(indices.size, np.uint64)
    return np.stack([roots, rank, indices.astype(np.uint64)], axis=1)


def _copies_of(members: Sorter, signed: Signed, copies: Sorter) -> None:
    group, stays = np.empty(0, np.uint64), np.empty(0, np.uint64)  # where the last batch ended
    for batch in members.batches():
        roots = np.concatenate([group, batch[:, 0]])
        indices = np.concatenate([stays, batch[:, 2]])
        starts = np.ones(len(roots), bool)
        starts[1:] = roots[1:] != roots[:-1]
        leader = indices[np.maximum.accumulate(np.where(starts, np.arange(len(roots)), 0))]
        gone = indices[indices != leader].astype(np.int64)
        copies.add(signed.rows_at(gone)[:, :1])
        group, stays = roots[-1:], leader[-1:]
