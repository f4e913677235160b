"""Shards PREFIX-00000, PREFIX-00001, ... read as one dataset with the path PREFIX, without a copy. Torch-free.

Called by everything that opens a dataset by its path (`open_dataset`). `lmtrain preprocess --shard-tokens` writes such
shards. All that is read of a joined dataset, and its digest, are those of the one file that `lmtrain data merge` makes
of the shards. PREFIX itself goes first: if PREFIX.idx exists, shards beside it are not looked at.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store.block_checksums import TokenBlocks
from lmtrain.data.store.index_cache import Index, IndexBuild, IndexCache, cache_if
from lmtrain.data.store.indexed_dataset import (
    CODES,
    HEADER,
    MAGIC,
    DatasetInfo,
    IndexedDataset,
    Ints,
    content_digest_of_pages,
    dataset_file,
)
from lmtrain.errors import DataError, MissingInputError
from lmtrain.runtime.files.crc32c import crc32c

UNKNOWN = -1  # the sidecar's num_bytes if the bytes of text were not counted
_HASHED_BYTES = 1 << 26  # bytes of tokens that are read at once to compute the digest
_CACHED_FROM = 1 << 22  # sequences from which on the joined index is kept in a file

Int64s = NDArray[np.int64]


def open_dataset(path: Path | str) -> IndexedDataset:
    """Open the dataset at `path`: PREFIX.bin and PREFIX.idx or, if there is no PREFIX.idx, its shards PREFIX-00000,
    PREFIX-00001, ... as one. Raise MissingInputError if there is neither, or if a number of the sequence is missing,
    DataError if files are damaged or shards have different tokenizers.
    """
    shards = shard_prefixes(Path(path))
    if not shards:
        return IndexedDataset.open(path)
    return JoinedDataset(Path(path), [IndexedDataset.open(shard) for shard in shards])


def dataset_exists(prefix: Path) -> bool:
    """Return True if there is a dataset with this path: PREFIX.idx, or shards of it."""
    return dataset_file(prefix, ".idx").is_file() or bool(_shard_numbers(prefix))


def shard_prefixes(prefix: Path) -> list[Path]:
    """Return the paths of the shards of a dataset that has no file PREFIX.idx itself; [] if it has, or if there are no
    shards. Raise MissingInputError if a number of their sequence is missing.
    """
    numbers = [] if dataset_file(prefix, ".idx").exists() else _shard_numbers(prefix)
    shards = [prefix.with_name(f"{prefix.name}-{number:05d}") for number in range(max(numbers, default=-1) + 1)]
    for number, shard in enumerate(shards):
        if number not in numbers:
            raise MissingInputError(
                f"{shard}.idx is missing, though {prefix} has shards up to {shards[-1].name}. Restore the shard, or "
                "give the shards that are there to `lmtrain data merge`."
            )
    return shards


def _shard_numbers(prefix: Path) -> list[int]:
    """Return the numbers of the shards of which a .bin or .idx is in the folder of `prefix`."""
    pattern = re.compile(re.escape(prefix.name) + r"-([0-9]{5})\.(?:bin|idx)")
    names = prefix.parent.iterdir() if prefix.name and prefix.parent.is_dir() else ()
    return sorted({int(match[1]) for path in names if (match := pattern.fullmatch(path.name))})


def require_compatible(datasets: Sequence[IndexedDataset]) -> None:
    """Raise DataError if datasets that are to become one have different dtypes or tokenizers."""
    first, *rest = datasets
    for other in rest:
        fingerprints = [d.info.tokenizer_fingerprint[:12] if d.info else "no sidecar" for d in (first, other)]
        for kind, expected, actual in (("dtype", first.dtype, other.dtype), ("tokenizer", *fingerprints)):
            if expected != actual:
                raise DataError(
                    f"{first.prefix} has the {kind} {expected}, but {other.prefix} has {actual}. "
                    f"Merge datasets of one {kind} only."
                )


class JoinedTokens:
    """The token ids of several datasets, end to end. A slice is a copy."""

    def __init__(self, shards: Sequence[IndexedDataset]) -> None:
        self.dtype, self.itemsize = shards[0].dtype, shards[0].dtype.itemsize
        self._parts = [shard.tokens for shard in shards]
        self.bounds: Int64s = np.cumsum([0, *map(len, self._parts)])  # first token of each shard, and the end

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, places: slice | int) -> Any:
        if not isinstance(places, slice):
            return self[places : places + 1][0]
        start, stop, _ = places.indices(len(self))
        pieces = [self._parts[k][first:last] for k, first, last in self.cut(start, stop)]
        return np.concatenate([np.empty(0, self.dtype), *pieces])

    def cut(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard number, first token, one past the last token) of the parts of a range of tokens, with places
        within the shard.
        """
        k = int(np.searchsorted(self.bounds, start, side="right")) - 1
        while start < stop:
            first, end = self.bounds[k : k + 2].tolist()
            last = min(stop, end)
            if last > start:
                yield k, start - first, last - first
            start, k = last, k + 1


class JoinedDataset(IndexedDataset):
    """The shards of a dataset, opened for reading as one. Its index is in memory, or for many sequences in a file of
    the folder PREFIX.index, and its tokens stay in the files of the shards.
    """

    def __init__(self, prefix: Path, shards: Sequence[IndexedDataset]) -> None:
        require_compatible(shards)
        self.prefix, self._shards, self.dtype = prefix, tuple(shards), shards[0].dtype
        self.num_sequences = sum(shard.num_sequences for shard in shards)
        self._joined_tokens = JoinedTokens(shards)
        self.tokens = cast(Ints, self._joined_tokens)  # because: callers use its length, dtype and slices only
        self._cache = IndexCache(prefix.with_name(f"{prefix.name}.index"))
        arrays = cache_if(self.num_sequences >= _CACHED_FROM, self._cache).get(
            "joined", self._identity, self._join_index, self._is_joined_index
        ).arrays  # fmt: skip
        self.lengths, self.pointers, self.document_index = (
            arrays[name] for name in ("lengths", "pointers", "document_index")
        )

    @property
    def shards(self) -> tuple[IndexedDataset, ...]:
        return self._shards

    def _identity(self) -> dict[str, Any]:
        """Return a dict that identifies the content of all shards."""
        return {"shards": [
            [shard.prefix.name, shard.idx_mtime_ns, shard.num_sequences, shard.num_documents, shard.num_tokens,
             shard.content_digest]
            for shard in self.shards
        ]}  # fmt: skip

    def _join_index(self, build: IndexBuild) -> dict[str, Any]:
        """Write the index of all shards to `build`: lengths, and pointers and documents counted on from the shards
        before.
        """
        build.append("document_index", "<i8", np.zeros(1, np.int64))
        num_bytes = num_sequences = 0
        for shard in self.shards:
            build.append("lengths", "<i4", shard.lengths)
            build.append("pointers", "<i8", shard.pointers + np.int64(num_bytes))
            build.append("document_index", "<i8", shard.document_index[1:] + np.int64(num_sequences))
            num_bytes += shard.num_tokens * self.dtype.itemsize
            num_sequences += shard.num_sequences
        return {}

    def _is_joined_index(self, index: Index) -> bool:
        sizes = {name: len(array) for name, array in index.arrays.items()}
        num_documents = sum(shard.num_documents for shard in self.shards)
        wanted = {"lengths": self.num_sequences, "pointers": self.num_sequences, "document_index": num_documents + 1}
        return sizes == wanted

    @cached_property
    def info(self) -> DatasetInfo | None:  # type: ignore[override]  # because: computed when it is first used
        """The sidecar that the merged dataset would have, but for the hashes of files; None if the shards have none."""
        infos = [shard.info for shard in self.shards if shard.info is not None]
        if not infos:
            return None
        byte_counts = [info.num_bytes for info in infos]
        return DatasetInfo(
            tokenizer_fingerprint=infos[0].tokenizer_fingerprint, vocab_size=infos[0].vocab_size,
            eod_id=infos[0].eod_id, max_id=max(info.max_id for info in infos), num_documents=self.num_documents,
            num_tokens=self.num_tokens, num_bytes=UNKNOWN if UNKNOWN in byte_counts else sum(byte_counts),
            dtype=self.dtype.name, content_sha256=self.content_digest,
        ).with_hash()  # fmt: skip

    @cached_property
    def content_digest(self) -> str:
        """The digest of the merged dataset. With sidecars it is the SHA-256 of all bytes: they are read once, and the
        result is kept in PREFIX.index.
        """
        if self.shards[0].info is None:
            return content_digest_of_pages(self.index_crc, self.num_tokens * self.dtype.itemsize, self._read_bytes)
        kept = self._cache.get(
            "digest", self._identity, lambda build: {"sha256": self._hash_content()},
            lambda index: isinstance(index.facts.get("sha256"), str),
        )  # fmt: skip
        return str(kept.facts["sha256"])

    def _hash_content(self) -> str:
        """Return the SHA-256 of all tokens, which are compared with their checksums, and of the joined index."""
        digest, step = hashlib.sha256(), _HASHED_BYTES // self.dtype.itemsize
        for shard in self.shards:
            for first in range(0, shard.num_tokens, step):
                digest.update(shard.read(first, min(first + step, shard.num_tokens)).data.cast("B"))
        for piece in self.index_bytes():
            digest.update(piece)
        return digest.hexdigest()

    def _read_bytes(self, start: int, count: int) -> bytes:
        """Return `count` bytes of the shards' .bin files, laid end to end, from byte `start` on."""
        width = self.dtype.itemsize
        first, last = start // width, min(-(-(start + count) // width), self.num_tokens)
        data: bytes = self._joined_tokens[first:last].tobytes()
        return data[start - first * width :][:count]

    def index_bytes(self) -> Iterator[memoryview]:
        """Yield the content of the merged dataset's .idx piece by piece."""
        yield memoryview(HEADER.pack(MAGIC, 1, CODES[self.dtype], self.num_sequences, len(self.document_index)))
        for array in (self.lengths, self.pointers, self.document_index):
            for first in range(0, len(array), _HASHED_BYTES // 8):
                yield np.ascontiguousarray(array[first : first + _HASHED_BYTES // 8]).data.cast("B")

    @cached_property
    def index_crc(self) -> int:
        crc = 0
        for piece in self.index_bytes():
            crc = crc32c(np.frombuffer(piece, np.uint8), crc)
        return crc

    @property
    def idx_mtime_ns(self) -> int:
        return max(shard.idx_mtime_ns for shard in self.shards)

    @property
    def blocks(self) -> TokenBlocks | None:
        """The block checksums of the first shard if every shard has some, to tell whether tokens are compared."""
        return self.shards[0].blocks if all(shard.blocks is not None for shard in self.shards) else None

    def gather(self, starts: Int64s, sizes: Int64s) -> tuple[Ints, Int64s]:
        sizes = np.broadcast_to(sizes, starts.shape).astype(np.int64)
        tokens, places, at = np.empty(int(sizes.sum()), self.dtype), np.cumsum(sizes) - sizes, 0
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            for k, first, last in self._joined_tokens.cut(start, start + size):
                tokens[at : at + last - first] = self.shards[k].tokens[first:last]
                at += last - first
        return tokens, places

    def check(self, starts: Int64s, sizes: Int64s, stride: int = 1, first: int = 0) -> None:
        starts = starts * stride + first
        ends = starts + sizes
        bounds = self._joined_tokens.bounds
        for k, shard in enumerate(self.shards):
            low, high = np.maximum(starts, bounds[k]), np.minimum(ends, bounds[k + 1])
            inside = high > low
            if inside.any():
                shard.check(low[inside] - bounds[k], (high - low)[inside])

    def check_intact(self) -> None:
        for shard in self.shards:
            shard.check_intact()

    def check_all(self, part: int = 0, num_parts: int = 1) -> None:
        for shard in self.shards:
            shard.check_all(part, num_parts)
