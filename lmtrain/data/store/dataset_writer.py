"""Writers of datasets: files grow in a temporary folder and get their final names when complete. Torch-free.

`DatasetWriter` writes one dataset from documents. `DatasetSpool` is a dataset under construction: it can record its
state and rewind to that state after a kill, which preprocessing uses to resume. Neither knows the documents' source.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from lmtrain.data.store.block_checksums import BlockSums, MappedFile, TokenBlocks, build_block_file, read_block_file
from lmtrain.data.store.indexed_dataset import (
    CODES,
    HEADER,
    MAGIC,
    SUFFIXES,
    DatasetInfo,
    Ints,
    dataset_file,
    working_folder,
)
from lmtrain.errors import DataError, LmtrainError
from lmtrain.runtime.files import atomic_files
from lmtrain.runtime.files.crc32c import crc32c
from lmtrain.runtime.files.existing_output import Found, Kind, begins_with, check_output, holds
from lmtrain.runtime.processes.fault_injection import fault_point

_COUNTS = ("num_documents", "num_sequences", "num_tokens", "max_id")
_GROWING = (".bin", ".lengths", ".counts")
_READ_BYTES = 4 << 20
_ONE_BLOCK = 1 << 62  # more than the size of any file, so that the file is one block


def open_without_links(path: Path, mode: str) -> IO[bytes]:
    """Open a file at a path where a killed process may have left anything; `mode` is as for `open`. Raise OSError if
    the path is a symbolic link; do not wait for another process if it is a named pipe.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    return open(path, mode, opener=opener)


class _HashedFile:
    """Append-only file with a running SHA-256 of its content and, if `blocks` is given, checksums of its blocks."""

    def __init__(self, path: Path, mode: str = "w+b", blocks: BlockSums | None = None) -> None:
        self.file: IO[bytes] = open_without_links(path, mode)
        self.num_bytes, self.digest, self.blocks = 0, hashlib.sha256(), blocks

    def append(self, data: Ints | bytes) -> None:
        view = memoryview(data if isinstance(data, bytes) else np.ascontiguousarray(data).data).cast("B")
        self.file.write(view)
        self.digest.update(view)
        if self.blocks is not None:
            self.blocks.add(view)
        self.num_bytes += view.nbytes

    def read(self) -> Iterator[bytes]:
        """Yield the content of the file from its beginning, as bytes in pieces of limited size."""
        self.file.flush()
        self.file.seek(0)
        while data := self.file.read(_READ_BYTES):
            yield data


@dataclass(frozen=True)
class SpoolState:
    """Recorded state of a spool: its counts, and the size and hash of each of its files."""

    num_documents: int
    num_sequences: int
    num_tokens: int
    max_id: int
    sizes: tuple[int, ...]
    hashes: tuple[str, ...]

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> SpoolState:
        return cls(
            **{name: int(tree[name]) for name in _COUNTS},
            sizes=tuple(map(int, tree["sizes"])),
            hashes=tuple(map(str, tree["hashes"])),
        )


class DatasetSpool:
    """A dataset under construction, as the growing files NAME.bin, NAME.lengths and NAME.counts of a folder.

    Data that grows with the number of documents is on disk, so memory does not grow. `prefix` is used in messages only.
    With empty=False the files exist already, and `rewind` must be called next.
    """

    def __init__(self, folder: Path, name: str, prefix: Path, dtype: Any, *, empty: bool = True) -> None:
        self.folder, self.name, self.prefix, self.dtype = folder, name, prefix, np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"A .bin cannot hold ids of dtype {self.dtype}. Use {', '.join(d.name for d in CODES)}.")
        self.num_documents = self.num_sequences = self.num_tokens = 0
        self.max_id = -1
        self.sidecar_sha256: str | None = None  # set by `finish`
        self._resources = ExitStack()
        self._files = self._bin, self._lengths, self._counts = self._open("w+b" if empty else "r+b")

    def add_documents(self, tokens: Ints, lengths: Ints, num_sequences: Ints) -> None:
        """Append documents: their tokens, the length of each sequence, and the number of sequences per document.

        Raise ValueError if the three disagree, DataError if an id does not fit the dtype or a sequence exceeds int32.
        """
        if lengths.sum() != len(tokens) or num_sequences.sum() != len(lengths):
            raise ValueError("lengths must add up to the tokens, num_sequences to the lengths")
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"A sequence has {lengths.max()} tokens; an .idx allows {2**31 - 1}. Split the document.")
        if len(tokens):
            low, high = 0 if tokens.dtype.kind == "u" else int(tokens.min()), int(tokens.max())
            if low < 0 or high > np.iinfo(self.dtype).max:
                wrong_id = low if low < 0 else high
                raise DataError(
                    f"The id {wrong_id} does not fit into {self.prefix}.bin, whose ids are {self.dtype}. Use int32."
                )
            self.max_id = max(self.max_id, high)
        with atomic_files.storage_errors(self.prefix, "Writing"):
            self._bin.append(tokens.astype(self.dtype, copy=False))
            self._lengths.append(lengths.astype("<i4", copy=False))
            self._counts.append(num_sequences.astype("<i8", copy=False))
        self.num_tokens += len(tokens)
        self.num_sequences += len(lengths)
        self.num_documents += len(num_sequences)

    def record_state(self) -> SpoolState:
        """Flush all data to the operating system, so that a kill cannot lose it, and return the state of the dataset
        under construction: its counts, and the size and hash of each file.
        """
        with atomic_files.storage_errors(self.prefix, "Writing"):
            for file in self._files:
                file.file.flush()
        return SpoolState(
            **{name: getattr(self, name) for name in _COUNTS},
            sizes=tuple(file.num_bytes for file in self._files),
            hashes=tuple(file.digest.hexdigest() for file in self._files),
        )

    def rewind(self, states: Sequence[SpoolState]) -> int:
        """Return how many of `states`, recorded states from old to new, the files of the dataset under construction
        still match, counted up to the first that they do not match. Truncate the files to the last matching state, or
        to nothing if there is none.
        """
        num_matching = 0
        with atomic_files.storage_errors(self.prefix, "Reading"):
            hashes = [_hash_prefixes(file, [state.sizes[i] for state in states]) for i, file in enumerate(self._files)]
            for state, digests in zip(states, zip(*hashes, strict=True), strict=True):
                if any(d is None or d.hexdigest() != h for d, h in zip(digests, state.hashes, strict=True)):
                    break
                num_matching += 1
            last = num_matching - 1
            if num_matching:
                self._truncate_to(states[last], [file_hashes[last] for file_hashes in hashes])
            else:
                self._truncate_to(None, [])
        return num_matching

    def finish(self, facts: dict[str, Any] | None = None, tokenizer: bytes | None = None) -> None:
        """Write the .idx and close the files. If `facts` and `tokenizer` are given, also write the tokenizer's file,
        whose content is `tokenizer`, the file of block checksums and the .json sidecar. `facts` are the sidecar's
        fields tokenizer_fingerprint, vocab_size, eod_id, num_bytes and made_from; the other fields are counted here.

        `sync` puts the files on disk.
        """
        with atomic_files.storage_errors(self.prefix, "Writing"):
            for suffix in (".idx", ".tokenizer.json", ".blocks", ".json"):
                self._path(suffix).unlink(missing_ok=True)  # because: a killed process may have left a link or a pipe
            index = _HashedFile(self._path(".idx"), blocks=BlockSums(_ONE_BLOCK))
            index.digest = self._bin.digest.copy()  # because: content_sha256 covers .bin, then .idx
            with index.file:
                self._write_index(index)
            if facts is not None and tokenizer is not None:
                assert self._bin.blocks is not None
                assert index.blocks is not None
                blocks = build_block_file(self._bin.blocks.sums(), self._bin.num_bytes, int(index.blocks.sums()[0]))
                self._path(".tokenizer.json").write_bytes(tokenizer)
                self._path(".blocks").write_bytes(blocks)
                info = DatasetInfo(
                    **facts,
                    max_id=self.max_id,
                    num_documents=self.num_documents,
                    num_tokens=self.num_tokens,
                    dtype=self.dtype.name,
                    content_sha256=index.digest.hexdigest(),
                    blocks_sha256=hashlib.sha256(blocks).hexdigest(),
                    tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
                ).with_hash()
                self._path(".json").write_bytes(info.to_bytes())
                self.sidecar_sha256 = info.sidecar_sha256
            self.close()

    def sync(self) -> None:
        """Wait until all files of the finished dataset are on disk."""
        with atomic_files.storage_errors(self.prefix, "Writing"):
            for path in filter(Path.exists, map(self._path, SUFFIXES)):
                atomic_files.fsync_file(path)
            atomic_files.fsync_dir(self.folder)

    def close(self) -> None:
        self._resources.close()

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.name}{suffix}"

    def _open(self, mode: str) -> list[_HashedFile]:
        with atomic_files.storage_errors(self.folder / self.name, "Making"), ExitStack() as resources:
            opened = []
            for suffix in _GROWING:
                opened.append(_HashedFile(self._path(suffix), mode, BlockSums() if suffix == ".bin" else None))
                resources.enter_context(opened[-1].file)
            self._resources = resources.pop_all()
        return opened

    def _truncate_to(self, state: SpoolState | None, digests: list[Any]) -> None:
        """Truncate the files of the dataset under construction to a recorded state and take over its counts; to nothing
        if `state` is None. `digests` are the running SHA-256 hashes of the files at that state.
        """
        for i, file in enumerate(self._files):
            file.num_bytes = state.sizes[i] if state else 0
            file.digest = digests[i] if state else hashlib.sha256()
            file.file.truncate(file.num_bytes)
            if file.blocks is not None:
                file.blocks = BlockSums()
                for data in file.read():
                    file.blocks.add(memoryview(data))
            file.file.seek(file.num_bytes)
        for name in _COUNTS:
            setattr(self, name, getattr(state, name) if state else -(name == "max_id"))

    def _write_index(self, index: _HashedFile) -> None:
        """Write the content of the .idx to `index`: header, sequence lengths, pointers and document index, computed
        from the .lengths and .counts files.
        """
        index.append(HEADER.pack(MAGIC, 1, CODES[self.dtype], self.num_sequences, self.num_documents + 1))
        for data in self._lengths.read():
            index.append(data)
        at = 0
        for data in self._lengths.read():
            ends = at + np.cumsum(np.frombuffer(data, "<i4"), dtype=np.int64) * self.dtype.itemsize
            index.append(np.append(np.int64(at), ends[:-1]))
            at = int(ends[-1])
        index.append(np.zeros(1, np.int64))
        at = 0
        for data in self._counts.read():
            ends = at + np.cumsum(np.frombuffer(data, "<i8"))
            index.append(ends)
            at = int(ends[-1])


def _hash_prefixes(file: _HashedFile, sizes: list[int]) -> list[Any]:
    """Return the running SHA-256 of the first `size` bytes of a file for each of these ascending sizes; None for a size
    beyond its end.
    """
    digest, position, hashes = hashlib.sha256(), 0, []
    file.file.seek(0)
    for size in sizes:
        while position < size and (data := file.file.read(min(_READ_BYTES, size - position))):
            digest.update(data)
            position += len(data)
        hashes.append(digest.copy() if position == size else None)
    return hashes


def publish(folder: Path, name: str, prefix: Path) -> None:
    """Rename the files NAME.* of a finished dataset in `folder` to PREFIX.*. The .idx of a dataset that is replaced is
    moved to `folder` first, and the new .idx is renamed last.

    A call after a kill completes the remaining renames; a call after completion does nothing.
    """
    with atomic_files.storage_errors(prefix, "Writing"):
        if not (folder / f"{name}.idx").exists():
            return
        fault_point("data.publish")
        if dataset_file(prefix, ".idx").exists():  # because: its name tells a call after a kill what was going on
            os.replace(dataset_file(prefix, ".idx"), folder / f"{name}{_REPLACED}")
        for suffix in (".json", ".tokenizer.json", ".blocks"):  # the file of the dataset that is replaced
            if not (folder / f"{name}{suffix}").exists() and (folder / f"{name}.bin").exists():
                dataset_file(prefix, suffix).unlink(missing_ok=True)
        for suffix in (".bin", ".tokenizer.json", ".blocks", ".json", ".idx"):
            if (folder / f"{name}{suffix}").exists():
                os.replace(folder / f"{name}{suffix}", dataset_file(prefix, suffix))
                fault_point("data.publish")
        atomic_files.fsync_dir(prefix.parent)


_REPLACED = ".replaced.idx"
_KINDS = {
    ".idx": Kind("the index of a dataset", begins_with(MAGIC)),
    ".json": Kind("the sidecar of a dataset", holds(f'"format": "{DatasetInfo.format}"')),
}


def check_dataset(prefix: Path, *, overwrite: bool, made_from: str | None = None) -> Found:
    """Return what is at a prefix at which a dataset is to be written, as `check_output` does for its files together.
    Raise OutputError if one of the files must not be replaced. `made_from` describes inputs and options, see
    existing_output.py; the dataset is the same if its sidecar records this text.
    """
    has_index = _KINDS[".idx"].fits(dataset_file(prefix, ".idx"))
    is_unfinished = not has_index and _is_renaming(prefix)
    is_same = has_index and made_from is not None and _recorded(dataset_file(prefix, ".json")) == made_from
    other = Kind("a file of a dataset", lambda path: has_index)  # because: only the index tells what the others are
    found = [
        check_output(
            dataset_file(prefix, suffix), _KINDS.get(suffix, other), overwrite=overwrite, is_same=is_same,
            is_unfinished=is_unfinished,
        )
        for suffix in SUFFIXES
    ]  # fmt: skip
    return next((state for state in found if state is not Found.NOTHING), Found.NOTHING)


def _is_renaming(prefix: Path) -> bool:
    """Return whether a killed `publish` of a DatasetWriter has renamed some of the files of a dataset, not its .idx,
    or has moved the .idx of the dataset that it replaces."""
    folder = working_folder(prefix)
    return any(
        (folder / f"{name}.idx").exists()
        and ((folder / f"{name}{_REPLACED}").exists() or not (folder / f"{name}.bin").exists())
        for name in ("data", "0-00000")
    )


def _recorded(sidecar: Path) -> str | None:
    """Return what the sidecar at a path records of inputs and options, None if it is missing or damaged."""
    try:
        return DatasetInfo.read(sidecar).made_from
    except LmtrainError:
        return None


class DatasetWriter:
    """Context manager that writes a dataset; the dataset appears only if the `with` block ends without an exception.

    The temporary files are in a folder beside the prefix, locked by one process at a time.
    """

    def __init__(
        self, prefix: Path | str, dtype: Any, *, overwrite: bool = False, made_from: str | None = None
    ) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        self._overwrite, self._made_from = overwrite, made_from
        self._resources = ExitStack()
        self._facts: dict[str, Any] | None = None
        self._tokenizer: bytes | None = None

    def __enter__(self) -> DatasetWriter:
        check_dataset(self.prefix, overwrite=self._overwrite)
        folder = working_folder(self.prefix)
        with ExitStack() as resources:
            resources.enter_context(atomic_files.folder_lock(folder))
            resources.callback(shutil.rmtree, folder, ignore_errors=True)  # also removes a killed writer's files
            self._spool = DatasetSpool(folder, "data", self.prefix, self.dtype)
            resources.callback(self._spool.close)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            if kind is None:
                self._spool.finish(self._facts, self._tokenizer)
                self._spool.sync()
                publish(self._spool.folder, self._spool.name, self.prefix)

    def add_documents(self, tokens: Ints, lengths: Ints, num_sequences: Ints) -> None:
        """Append documents: their tokens, the length of each sequence, and the number of sequences per document."""
        self._spool.add_documents(tokens, lengths, num_sequences)

    def describe(
        self, *, tokenizer: bytes, fingerprint: str, vocab_size: int, eod_id: int | None, num_bytes: int
    ) -> None:
        """Set what the .json sidecar records and the writer cannot count: the tokenizer (file content, fingerprint,
        vocabulary size, end-of-document id) and the number of bytes of text. Without this call the dataset gets no
        sidecar.
        """
        self._tokenizer = tokenizer
        self._facts = {
            "tokenizer_fingerprint": fingerprint, "vocab_size": vocab_size, "eod_id": eod_id, "num_bytes": num_bytes,
            "made_from": self._made_from,
        }  # fmt: skip


def check_finished_files(path_of: Callable[[str], Path], sidecar_sha256: str, tokenizer: bytes) -> None:
    """Raise DataError unless the files of a finished dataset are undamaged, its .json sidecar has the hash
    `sidecar_sha256`, and its tokenizer file has the content `tokenizer`. `path_of` returns the path of the file with a
    suffix such as .bin.
    """
    info = DatasetInfo.read(path_of(".json"))
    if info.sidecar_sha256 != sidecar_sha256 or info.blocks_sha256 is None:
        raise DataError(f"{path_of('.json')} is not the sidecar that this command wrote. Make the dataset again.")
    if atomic_files.read_bytes(path_of(".tokenizer.json"), len(tokenizer)) != tokenizer:
        raise DataError(f"{path_of('.tokenizer.json')} is not the tokenizer of this dataset. Make the dataset again.")
    index, tokens = (MappedFile(path_of(suffix), path_of(suffix).stat().st_size) for suffix in (".idx", ".bin"))
    sums, index_crc = read_block_file(path_of(".blocks"), info.blocks_sha256, tokens.num_bytes)
    if crc32c(index.bytes) != index_crc:
        raise DataError(f"{index.path} is not the index that this command wrote. Make the dataset again.")
    TokenBlocks.from_sums(tokens, np.dtype(info.dtype).itemsize, sums).check_all()
