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

from lmtrain.data.store.blocks import BlockSums, Mapped, TokenBlocks, block_file, read_block_file
from lmtrain.data.store.format import CODES, HEADER, MAGIC, SUFFIXES, DatasetInfo, Ints, part
from lmtrain.errors import DataError, OutputError
from lmtrain.runtime.files import files
from lmtrain.runtime.files.checksum import crc32c
from lmtrain.runtime.processes.faults import fault_point

_COUNTS = ("num_documents", "num_sequences", "num_tokens", "max_id")
_GROWING = (".bin", ".lengths", ".counts")
_READ_BYTES = 4 << 20
_ONE_BLOCK = 1 << 62  # more than the size of any file, so that the file is one block


def open_own(path: Path, mode: str) -> IO[bytes]:
    """Open a file in a folder that a killed process may have left; refuse links, and do not block on pipes."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    return open(path, mode, opener=opener)


class _Growing:
    """Append-only file with a running SHA-256 of its content and, if `blocks` is given, checksums of its blocks."""

    def __init__(self, path: Path, mode: str = "w+b", blocks: BlockSums | None = None) -> None:
        self.file: IO[bytes] = open_own(path, mode)
        self.num_bytes, self.digest, self.blocks = 0, hashlib.sha256(), blocks

    def append(self, data: Ints | bytes) -> None:
        view = memoryview(data if isinstance(data, bytes) else np.ascontiguousarray(data).data).cast("B")
        self.file.write(view)
        self.digest.update(view)
        if self.blocks is not None:
            self.blocks.add(view)
        self.num_bytes += view.nbytes

    def read(self, at: int = 0) -> Iterator[bytes]:
        self.file.flush()
        self.file.seek(at)
        while data := self.file.read(_READ_BYTES):
            yield data


@dataclass(frozen=True)
class Mark:
    """Recorded state of a spool: its counts, and the size and hash of each of its files."""

    num_documents: int
    num_sequences: int
    num_tokens: int
    max_id: int
    sizes: tuple[int, ...]
    hashes: tuple[str, ...]

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Mark:
        return cls(
            **{name: int(tree[name]) for name in _COUNTS},
            sizes=tuple(map(int, tree["sizes"])),
            hashes=tuple(map(str, tree["hashes"])),
        )


class DatasetSpool:
    """A dataset under construction, as the files NAME.bin, NAME.lengths and NAME.counts of a folder.

    Data that grows with the number of documents is on disk, so memory does not grow. `prefix` is used in messages only.
    With empty=False the files exist already, and `rewind` must be called next.
    """

    def __init__(self, folder: Path, name: str, prefix: Path, dtype: Any, *, empty: bool = True) -> None:
        self.folder, self.name, self.prefix, self.dtype = folder, name, prefix, np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"{self.dtype} is no dtype of a token file. Use {', '.join(d.name for d in CODES)}.")
        self.num_documents = self.num_sequences = self.num_tokens = 0
        self.max_id = -1
        self.sidecar_sha256: str | None = None  # set by `finish`
        self._held = ExitStack()
        self._growing = self._bin, self._lengths, self._counts = self._open("w+b" if empty else "r+b")

    def add_documents(self, tokens: Ints, lengths: Ints, num_sequences: Ints) -> None:
        """Append documents: their tokens, the length of each sequence, and the number of sequences per document.

        Raise ValueError if the three disagree, DataError if an id does not fit the dtype or a sequence exceeds int32.
        """
        if lengths.sum() != len(tokens) or num_sequences.sum() != len(lengths):
            raise ValueError("tokens, lengths and num_sequences do not belong together")
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"A sequence of {lengths.max()} tokens is longer than .idx can say. Split the document.")
        if len(tokens):
            low, high = 0 if tokens.dtype.kind == "u" else int(tokens.min()), int(tokens.max())
            if low < 0 or high > np.iinfo(self.dtype).max:
                wrong = low if low < 0 else high
                raise DataError(f"The id {wrong} does not fit {self.prefix}.bin, which holds {self.dtype}. Use int32.")
            self.max_id = max(self.max_id, high)
        with files.storage_errors(self.prefix, "Writing"):
            self._bin.append(tokens.astype(self.dtype, copy=False))
            self._lengths.append(lengths.astype("<i4", copy=False))
            self._counts.append(num_sequences.astype("<i8", copy=False))
        self.num_tokens += len(tokens)
        self.num_sequences += len(lengths)
        self.num_documents += len(num_sequences)

    def mark(self) -> Mark:
        """Return the spool's state. All data is flushed to the operating system, so that a kill cannot lose any."""
        with files.storage_errors(self.prefix, "Writing"):
            for one in self._growing:
                one.file.flush()
        counts = {name: getattr(self, name) for name in _COUNTS}
        hashes = tuple(one.digest.hexdigest() for one in self._growing)
        return Mark(**counts, sizes=tuple(one.num_bytes for one in self._growing), hashes=hashes)

    def rewind(self, marks: Sequence[Mark]) -> int:
        """Return how many marks, oldest first, match the files on disk; rewind the spool to the last of them."""
        holds = 0
        with files.storage_errors(self.prefix, "Reading"):
            states = [_states(one, [mark.sizes[i] for mark in marks]) for i, one in enumerate(self._growing)]
            for mark, digests in zip(marks, zip(*states, strict=True), strict=True):
                if any(d is None or d.hexdigest() != h for d, h in zip(digests, mark.hashes, strict=True)):
                    break
                holds += 1
            self._go_back(marks[holds - 1] if holds else None, [state[holds - 1] for state in states] if holds else [])
        return holds

    def finish(self, about: dict[str, Any] | None = None, tokenizer: bytes | None = None) -> None:
        """Write the index and, if `about` and `tokenizer` are given, the sidecar. `sync` puts the files on disk."""
        with files.storage_errors(self.prefix, "Writing"):
            for suffix in (".idx", ".tokenizer.json", ".blocks", ".json"):
                self._path(suffix).unlink(missing_ok=True)  # because: a killed process may have left a link or a pipe
            index = _Growing(self._path(".idx"), blocks=BlockSums(_ONE_BLOCK))
            index.digest = self._bin.digest.copy()  # because: content_sha256 covers .bin, then .idx
            with index.file:
                self._write_index(index)
            if about is not None and tokenizer is not None:
                assert self._bin.blocks is not None
                assert index.blocks is not None
                blocks = block_file(self._bin.blocks.sums(), self._bin.num_bytes, int(index.blocks.sums()[0]))
                self._path(".tokenizer.json").write_bytes(tokenizer)
                self._path(".blocks").write_bytes(blocks)
                info = DatasetInfo(
                    **about,
                    max_id=self.max_id,
                    num_documents=self.num_documents,
                    num_tokens=self.num_tokens,
                    dtype=self.dtype.name,
                    content_sha256=index.digest.hexdigest(),
                    blocks_sha256=hashlib.sha256(blocks).hexdigest(),
                    tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
                ).sealed()
                self._path(".json").write_bytes(info.to_bytes())
                self.sidecar_sha256 = info.sidecar_sha256
            self.close()

    def sync(self) -> None:
        """Wait until the files of a finished spool are on disk."""
        with files.storage_errors(self.prefix, "Writing"):
            for path in filter(Path.exists, map(self._path, SUFFIXES)):
                files.fsync_file(path)
            files.fsync_dir(self.folder)

    def close(self) -> None:
        self._held.close()

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.name}{suffix}"

    def _open(self, mode: str) -> list[_Growing]:
        with files.storage_errors(self.folder / self.name, "Making"), ExitStack() as held:
            growing = []
            for suffix in _GROWING:
                growing.append(_Growing(self._path(suffix), mode, BlockSums() if suffix == ".bin" else None))
                held.enter_context(growing[-1].file)
            self._held = held.pop_all()
        return growing

    def _go_back(self, mark: Mark | None, digests: list[Any]) -> None:
        for i, one in enumerate(self._growing):
            one.num_bytes = mark.sizes[i] if mark else 0
            one.digest = digests[i] if mark else hashlib.sha256()
            one.file.truncate(one.num_bytes)
            if one.blocks is not None:
                one.blocks = BlockSums()
                for data in one.read():
                    one.blocks.add(memoryview(data))
            one.file.seek(one.num_bytes)
        for name in _COUNTS:
            setattr(self, name, getattr(mark, name) if mark else -(name == "max_id"))

    def _write_index(self, index: _Growing) -> None:
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


def _states(growing: _Growing, ends: list[int]) -> list[Any]:
    """Return the running hash at each of these ascending sizes; None from the first size beyond the file's end on."""
    digest, at, states = hashlib.sha256(), 0, []
    growing.file.seek(0)
    for end in ends:
        while at < end and (data := growing.file.read(min(_READ_BYTES, end - at))):
            digest.update(data)
            at += len(data)
        states.append(digest.copy() if at == end else None)
    return states


def publish(folder: Path, name: str, prefix: Path) -> None:
    """Rename a finished spool's files to their final names: the old .idx is removed first, the new .idx comes last.

    A call after a kill completes the remaining renames; a call after completion does nothing.
    """
    with files.storage_errors(prefix, "Writing"):
        if not (folder / f"{name}.idx").exists():
            return
        fault_point("data.publish")
        part(prefix, ".idx").unlink(missing_ok=True)
        for suffix in (".json", ".tokenizer.json", ".blocks"):  # the file of the dataset that is replaced
            if not (folder / f"{name}{suffix}").exists() and (folder / f"{name}.bin").exists():
                part(prefix, suffix).unlink(missing_ok=True)
        for suffix in (".bin", ".tokenizer.json", ".blocks", ".json", ".idx"):
            if (folder / f"{name}{suffix}").exists():
                os.replace(folder / f"{name}{suffix}", part(prefix, suffix))
                fault_point("data.publish")
        files.fsync_dir(prefix.parent)


def refuse_taken(prefix: Path) -> None:
    """Raise OutputError if any file of the output dataset exists."""
    for path in (part(prefix, suffix) for suffix in SUFFIXES):
        if path.exists():
            raise OutputError(f"{path} exists already. Choose another output, or add --overwrite to replace it.")


def working_folder(prefix: Path) -> Path:
    """Return the folder where a dataset grows: beside its prefix, so that a rename moves the files."""
    return prefix.with_name(f".{prefix.name}.tmp")


class DatasetWriter:
    """Context manager that writes a dataset; the dataset appears only if the `with` block ends without an exception.

    The temporary files are in a folder beside the prefix, locked by one process at a time.
    """

    def __init__(self, prefix: Path | str, dtype: Any, *, overwrite: bool = False) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        self._overwrite = overwrite
        self._held = ExitStack()
        self._about: dict[str, Any] | None = None
        self._tokenizer: bytes | None = None

    def __enter__(self) -> DatasetWriter:
        if not self._overwrite:
            refuse_taken(self.prefix)
        folder = working_folder(self.prefix)
        with ExitStack() as held:
            held.enter_context(files.folder_lock(folder))
            held.callback(shutil.rmtree, folder, ignore_errors=True)  # also removes files that a killed writer left
            self._spool = DatasetSpool(folder, "data", self.prefix, self.dtype)
            held.callback(self._spool.close)
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if kind is None:
                self._spool.finish(self._about, self._tokenizer)
                self._spool.sync()
                publish(self._spool.folder, self._spool.name, self.prefix)

    def add_documents(self, tokens: Ints, lengths: Ints, num_sequences: Ints) -> None:
        """Append documents: their tokens, the length of each sequence, and the number of sequences per document."""
        self._spool.add_documents(tokens, lengths, num_sequences)

    def describe(
        self, *, tokenizer: bytes, fingerprint: str, vocab_size: int, eod_id: int | None, num_bytes: int
    ) -> None:
        """Set the sidecar's facts that the writer cannot count itself; without this call there is no sidecar."""
        self._tokenizer = tokenizer
        self._about = {
            "tokenizer_fingerprint": fingerprint, "vocab_size": vocab_size, "eod_id": eod_id, "num_bytes": num_bytes
        }  # fmt: skip


def check_finished(path_of: Callable[[str], Path], sidecar_sha256: str, tokenizer: bytes) -> None:
    """Raise DataError if a file of the dataset does not belong to this sidecar. `path_of` maps a suffix to the file."""
    info = DatasetInfo.read(path_of(".json"))
    if info.sidecar_sha256 != sidecar_sha256 or info.blocks_sha256 is None:
        raise DataError(f"{path_of('.json')} is not the sidecar that was written here. Make the dataset again.")
    if files.read_bytes(path_of(".tokenizer.json"), len(tokenizer)) != tokenizer:
        raise DataError(f"{path_of('.tokenizer.json')} is not the tokenizer of this work. Make the dataset again.")
    index, tokens = (Mapped(path_of(suffix), path_of(suffix).stat().st_size) for suffix in (".idx", ".bin"))
    sums, index_crc = read_block_file(path_of(".blocks"), info.blocks_sha256, tokens.num_bytes)
    if crc32c(index.bytes) != index_crc:
        raise DataError(f"{index.path} is not the index that was written here. Make the dataset again.")
    TokenBlocks.known(tokens, np.dtype(info.dtype).itemsize, sums).check_all()
