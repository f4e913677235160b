"""Block checksums of a .bin: computed while the file is written, compared when a block is first read. Torch-free.

Called by dataset_writer.py and indexed_dataset.py. P.blocks accompanies lmtrain's datasets; the sidecar holds its hash:

    32 bytes of header   LMBLOCKS, version, bytes of a block, bytes of P.bin, CRC-32C of P.idx, 0
    a uint32 each        CRC-32C of P.bin's blocks; the last may be shorter

A dataset of another tool has no P.blocks. The checksum of each block at its first read is then recorded beside the
dataset's indexes, 8 bytes a block (the checksum and its complement, 0 if the block was never read), and compared from
then on. csrc/blocks.cpp implements the arithmetic; the Python twins are in this file.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, StorageError
from lmtrain.runtime import compiled_helpers
from lmtrain.runtime.files import atomic_files
from lmtrain.runtime.files.crc32c import crc32c

BLOCK_BYTES = 1 << 16  # because: reading a sample reads as much from disk anyway; a TB needs 64 MB of checksums
_HEADER = struct.Struct("<8sIIQII")
_MAGIC, _VERSION = b"LMBLOCKS", 1
_UNCHECKED, _CHECKED, _UNKNOWN = 0, 1, 2
_CHECK_BYTES = 1 << 28  # bytes that are checked between two checks of the file's size
_PATHS: dict[int, Path] = {}  # path by csrc/'s number of the mapping

Int64s = NDArray[np.int64]
Checksums = NDArray[np.uint32]


class MappedFile:
    """Read-only memory map of a regular file that must have at least `num_bytes` bytes."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes, self.fd = path, num_bytes, -1
        with atomic_files.read_errors(path):
            self.fd, size = atomic_files.open_regular(path, follow_links=True)
        if size < num_bytes:
            raise self._truncation_error(size)
        self.bytes = _map_file(self.fd, num_bytes, path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def check_intact(self) -> None:
        """Raise DataError if the file has become shorter than when it was mapped, StorageError if reading any file that
        this process has mapped failed.
        """
        if (size := os.fstat(self.fd).st_size) < self.num_bytes:
            raise self._truncation_error(size)
        _raise_read_errors()

    def _truncation_error(self, size: int) -> DataError:
        return DataError(
            f"{self.path} has become shorter while it was in use: {size} of its {self.num_bytes} bytes are left. "
            "Restore the file, let nobody write to it, and start the command again."
        )


class MappedFiles:
    """Several mapped files that are checked in one compiled call, because every batch checks them."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._mapped_files = files
        self._fds_and_sizes = np.array([(file.fd, file.num_bytes) for file in files], np.int64).ravel()

    def check_intact(self) -> None:
        if compiled_helpers.lib is None or compiled_helpers.lib.files_lost(self._fds_and_sizes):
            for file in self._mapped_files:
                file.check_intact()


def _map_file(fd: int, num_bytes: int, path: Path) -> NDArray[np.uint8]:
    """Map the first num_bytes bytes of the open file `fd` into memory, read-only; `path` is its path for error
    messages.
    """
    if num_bytes == 0:  # because: mmap rejects an empty file
        return np.empty(0, np.uint8)
    if compiled_helpers.lib is None:
        return np.frombuffer(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ), np.uint8)
    try:
        mapped: NDArray[np.uint8]
        mapped, number = compiled_helpers.lib.map_file(fd, num_bytes)
    except RuntimeError as error:
        raise StorageError(f"Reading {path} failed: {error}. Check the memory limit (`ulimit -v`).") from error
    _PATHS[number] = path
    return mapped


def _raise_read_errors() -> None:
    """Raise StorageError if reading any of the files that this process has mapped failed."""
    if compiled_helpers.lib is None or not compiled_helpers.lib.maps_failed():
        return
    for number, path in list(_PATHS.items()):
        if compiled_helpers.lib.map_failed(number):
            raise StorageError(
                f"Reading {path} failed while it was in use: the disk has a fault, or the file was truncated. "
                "Check the system log, restore the file and start the command again."
            )


class BlockSums:
    """Block checksums of a file, computed while the file is written piece by piece."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._complete: list[Checksums] = []
        self._crc = self._filled = 0

    def add(self, data: memoryview) -> None:
        """Update the block checksums with the next bytes of the file."""
        view = np.frombuffer(data, np.uint8)
        complete, self._crc, self._filled = block_sums(view, self._block_bytes, self._crc, self._filled)
        if len(complete):
            self._complete.append(complete)

    def sums(self) -> Checksums:
        """Return the checksums of all blocks so far, including an unfinished last block."""
        unfinished = [np.array([self._crc], np.uint32)] if self._filled else []
        return np.concatenate([np.empty(0, np.uint32), *self._complete, *unfinished])


def build_block_file(sums: Checksums, num_bytes: int, index_crc: int) -> bytes:
    """Return the content of P.blocks for a .bin of num_bytes bytes with these block checksums."""
    return _HEADER.pack(_MAGIC, _VERSION, BLOCK_BYTES, num_bytes, index_crc, 0) + sums.astype("<u4").tobytes()


def read_block_file(path: Path, sha256: str, num_bytes: int) -> tuple[Checksums, int]:
    """Read a dataset's .blocks file: return (the checksum of each block of the .bin, CRC-32C of the .idx). Raise
    DataError if its SHA-256 is not `sha256`, which the dataset's .json states, or if it is not for a .bin of
    `num_bytes` bytes.
    """
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    way_out = "Copy it from where the dataset was made, make the dataset again, or read it unchecked: data.verify=none."
    if not path.exists():
        raise DataError(f"{path} is missing, although the dataset's .json lists it. {way_out}")
    data = atomic_files.read_bytes(path, _HEADER.size + 4 * num_blocks)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(f"{path} does not have the hash in the dataset's .json, so one of them is damaged. {way_out}")
    if len(data) != _HEADER.size + 4 * num_blocks:
        raise DataError(
            f"{path} has {len(data)} bytes, but the checksums of a .bin of {num_bytes} bytes take "
            f"{_HEADER.size + 4 * num_blocks} bytes. {way_out}"
        )
    magic, version, block_bytes, num_covered, index_crc, _ = _HEADER.unpack_from(data)
    if (magic, version, block_bytes, num_covered) != (_MAGIC, _VERSION, BLOCK_BYTES, num_bytes):
        raise DataError(
            f"The header of {path} states version {version}, blocks of {block_bytes} bytes and a .bin of {num_covered} "
            f"bytes. This lmtrain reads version {_VERSION} and blocks of {BLOCK_BYTES} bytes, and the .bin has "
            f"{num_bytes} bytes. {way_out}"
        )
    return np.frombuffer(data, "<u4", num_blocks, _HEADER.size), index_crc


@dataclass
class TokenBlocks:
    """The checksums of a mapped .bin and which blocks have already been compared."""

    tokens: MappedFile
    width: int  # bytes per token
    sums: Checksums
    state: NDArray[np.uint8]
    record: ChecksumRecord | None = None

    def __post_init__(self) -> None:
        record = -1 if self.record is None else self.record.fd
        self._blocks = compiled_helpers.compiled("BlockCheck", BlockCheckTwin)(  # updates `state`
            self.tokens.bytes, BLOCK_BYTES, self.sums, self.state, self.width, record, self.tokens.fd
        )

    @classmethod
    def from_sums(cls, tokens: MappedFile, width: int, sums: Checksums) -> TokenBlocks:
        """Build for a .bin whose block checksums are known, from P.blocks."""
        return cls(tokens, width, sums, np.full(len(sums), _UNCHECKED, np.uint8))

    @classmethod
    def from_record(cls, tokens: MappedFile, width: int, record: ChecksumRecord) -> TokenBlocks:
        """Build for a .bin without P.blocks: a block's checksum is recorded at its first read and compared later."""
        sums, has_sum = record.read(-(-tokens.num_bytes // BLOCK_BYTES))
        return cls(tokens, width, sums, np.where(has_sum, _UNCHECKED, _UNKNOWN).astype(np.uint8), record)

    def check(self, starts: Int64s, sizes: Int64s, stride: int = 1, first: int = 0) -> None:
        """Raise DataError if a block that contains tokens of these ranges does not match its checksum; a block is
        compared only the first time. Range i is sizes[i] tokens from token first + starts[i] * stride on; if `sizes`
        has one entry, all ranges have that size.
        """
        bad = self._blocks.check(starts, sizes, stride, first)
        if bad != -1:
            self.tokens.check_intact()  # because: a truncated file fails here too, with a clearer error
        if bad >= 0:
            raise self._damage_error(bad)

    def check_all(self, part: int = 0, num_parts: int = 1) -> None:
        """Check all blocks, or only those of part number `part` (from 0) if the tokens are divided into `num_parts`
        equal parts. Raise DataError at a wrong checksum.
        """
        num_tokens, step = self.tokens.num_bytes // self.width, _CHECK_BYTES // self.width
        first, last = (num_tokens * at // num_parts for at in (part, part + 1))
        for start in range(first, last, step):
            self.check(np.array([start]), np.array([min(step, last - start)]))
            self.tokens.check_intact()

    def _damage_error(self, block: int) -> DataError:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self.tokens.num_bytes)
        crc, expected = crc32c(self.tokens.bytes[start:stop]), int(self.sums[block])
        origin = "was written" if self.record is None else "was first read"
        replaced = "" if self.record is None else f", or remove {self.record.path} if you replaced the file yourself"
        prefix = self.tokens.path.with_suffix("")
        return DataError(
            f"{self.tokens.path} is damaged: bytes {start} to {stop - 1} (block {block}) are not what {origin} "
            f"(CRC-32C {crc:08x} instead of {expected:08x}). `lmtrain data verify {prefix}` checks the whole file; "
            f"restore the file or make the dataset again{replaced}. data.verify=none reads it without checks."
        )


class ChecksumRecord:
    """File that records block checksums at first read, for a dataset without P.blocks; unused without write access."""

    def __init__(self, path: Path, notify: Callable[[str], None]) -> None:
        self.path, self.fd, self._notify = path, -1, notify
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def read(self, num_blocks: int) -> tuple[Checksums, NDArray[np.bool_]]:
        """Return two arrays with one entry per block of the .bin: the recorded checksum, and whether one is recorded.
        Damaged entries count as not recorded; the user is notified of their number.
        """
        entries = np.zeros(num_blocks + 1, "<u8")
        if self.fd >= 0:
            data = atomic_files.read_range(self.fd, 0, entries.nbytes)
            entries[: len(data) // 8] = np.frombuffer(data, "<u8", len(data) // 8)
        sums = (entries & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        is_valid = (entries >> np.uint64(32)).astype(np.uint32) == ~sums
        if (num_damaged := int(((entries != 0) & ~is_valid).sum())) > 0:
            self._notify(f"{self.path}: {num_damaged} of {len(entries)} entries were damaged and are recorded again")
        self._index = int(sums[-1]) if is_valid[-1] else None
        return sums[:-1], is_valid[:-1]

    def matches_index(self, num_blocks: int, crc: int) -> bool:
        """Return True if `crc` is the checksum of the .idx that was recorded. If none was recorded, record `crc` and
        return True.

        The entry of the .idx follows the entries of all blocks.
        """
        if self._index is None:
            if self.fd >= 0:
                os.pwrite(self.fd, struct.pack("<II", crc, crc ^ 0xFFFFFFFF), 8 * num_blocks)
            return True
        return self._index == crc


def block_sums(data: NDArray[np.uint8], block_bytes: int, crc: int, filled: int) -> tuple[Checksums, int, int]:
    """Return the checksums of the blocks that `data` completes, and checksum and size of the unfinished last block.

    `crc` and `filled` are those of the block that earlier data left unfinished.
    """
    return compiled_helpers.compiled("block_sums", block_sums_twin)(data, block_bytes, crc, filled)


def block_sums_twin(data: NDArray[np.uint8], block_bytes: int, crc: int, filled: int) -> tuple[Checksums, int, int]:
    """Compute `block_sums` in Python: return (checksums of the blocks that `data` completes, checksum of the unfinished
    last block, its size). `crc` and `filled` are checksum and size of the block that earlier data left unfinished.
    """
    sums, offset = [], 0
    while offset < len(data):
        piece = data[offset : offset + block_bytes - filled]
        crc, filled, offset = crc32c(piece, crc), filled + len(piece), offset + len(piece)
        if filled == block_bytes:
            sums.append(crc)
            crc = filled = 0
    return np.array(sums, np.uint32), crc, filled


@dataclass
class BlockCheckTwin:
    """Python reference for the compiled `BlockCheck`: compares the blocks of a .bin with their checksums at first read.
    `state` holds one of the constants _UNCHECKED, _CHECKED and _UNKNOWN per block.
    """

    data: NDArray[np.uint8]
    block_bytes: int
    sums: Checksums
    state: NDArray[np.uint8]
    width: int  # bytes per token
    record: int  # file descriptor of the record, or -1
    fd: int  # file descriptor of the .bin, or -1

    def check(self, starts: Int64s, sizes: Int64s, stride: int = 1, first: int = 0) -> int:
        """Return the number of the first block in these token ranges whose checksum is wrong, -2 if the file was
        truncated or could not be read, else -1. Range i is sizes[i] tokens from token first + starts[i] * stride on.
        """
        starts = starts * stride + first
        for start, stop in zip(starts.tolist(), (starts + sizes).tolist(), strict=True):
            if not 0 <= start <= stop <= len(self.data) // self.width:
                raise ValueError("a range of tokens lies outside the file")
            last = -(-stop * self.width // self.block_bytes) if stop > start else 0
            for block in range(start * self.width // self.block_bytes, last):
                if self.state[block] != _CHECKED and not self._compare(block):
                    return block
        return -2 if self.fd >= 0 and os.fstat(self.fd).st_size < len(self.data) else -1

    def _compare(self, block: int) -> bool:
        """Return False if the checksum of this block is wrong. Otherwise mark the block as checked; if its checksum was
        not known, write it to the record.
        """
        crc = crc32c(self.data[block * self.block_bytes : (block + 1) * self.block_bytes])
        if self.state[block] == _UNCHECKED and crc != self.sums[block]:
            return False
        if self.state[block] != _UNKNOWN or self.record < 0 or _write_record_entry(self.record, block, crc):
            self.state[block] = _CHECKED
        return True


def _write_record_entry(record_fd: int, block: int, crc: int) -> bool:
    """Write the checksum `crc` of block number `block` to the record file with the descriptor record_fd. Return True if
    it was written.
    """
    try:
        return os.pwrite(record_fd, struct.pack("<II", crc, crc ^ 0xFFFFFFFF), 8 * block) == 8
    except OSError:
        return False
