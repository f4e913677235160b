"""Checksums of the blocks of a .bin: made while it is written, compared where it is first read. Torch-free.

Called by writer.py and indexed.py. P.blocks stands beside a dataset that we wrote and is named in its sidecar by hash:

    32 bytes of header   LMBLOCKS, version, bytes of a block, bytes of P.bin, CRC-32C of P.idx, 0
    a uint32 each        CRC-32C of P.bin's blocks; the last may be shorter

A dataset of another tool has none. What is first read of it is recorded beside its indexes, 8 bytes a block (the
checksum and its opposite, 0 where nothing was read yet), and compared from then on. csrc/blocks.cpp does the
arithmetic; its twins are here.
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

from lmtrain import native
from lmtrain.errors import DataError, StorageError
from lmtrain.runtime.files import files
from lmtrain.runtime.files.checksum import crc32c

BLOCK_BYTES = 1 << 16  # because: what the system reads at once anyway, for one sample; 64 MB of checksums for a TB
_HEADER = struct.Struct("<8sIIQII")
_MAGIC, _VERSION = b"LMBLOCKS", 1
_UNCHECKED, _CHECKED, _UNKNOWN = 0, 1, 2
_ALL = 1 << 28  # bytes that are checked between two looks at the file
_WATCHED: dict[int, Path] = {}  # by the number that csrc/ knows a mapping by

Int64s = NDArray[np.int64]
Sums = NDArray[np.uint32]


class Mapped:
    """All bytes of a plain file, of which there must be as many as `num_bytes` says."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes, self.fd = path, num_bytes, -1
        with files.read_errors(path):
            self.fd, size = files.open_regular(path, follow_links=True)
        if size < num_bytes:
            raise self._too_short(size)
        self.bytes = _map(self.fd, num_bytes, path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def refuse_lost(self) -> None:
        """Raises where what was read of this file up to now may not be what is in it."""
        if (size := os.fstat(self.fd).st_size) < self.num_bytes:
            raise self._too_short(size)
        _refuse_failed()

    def _too_short(self, size: int) -> DataError:
        return DataError(
            f"{self.path} has become shorter while it was in use: {size} of its {self.num_bytes} bytes are left. "
            "Restore the file, let nobody write to it, and start the command again."
        )


class Watch:
    """Several mapped files, asked after at once: it is done for every batch."""

    def __init__(self, mapped: Sequence[Mapped]) -> None:
        self._mapped = mapped
        self._files = np.array([(one.fd, one.num_bytes) for one in mapped], np.int64).ravel()

    def refuse_lost(self) -> None:
        if native.lib is None or native.lib.files_lost(self._files):
            for one in self._mapped:
                one.refuse_lost()


def _map(fd: int, num_bytes: int, path: Path) -> NDArray[np.uint8]:
    if num_bytes == 0:  # because: an empty file cannot be mapped
        return np.empty(0, np.uint8)
    if native.lib is None:
        return np.frombuffer(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ), np.uint8)
    try:
        made: NDArray[np.uint8]
        made, number = native.lib.map_file(fd, num_bytes)
    except RuntimeError as error:
        raise StorageError(f"Reading {path} failed: {error}. Look at the limits of memory (`ulimit -v`).") from error
    _WATCHED[number] = path
    return made


def _refuse_failed() -> None:
    """Raises where any mapping of this process could not be read."""
    if native.lib is None or not native.lib.maps_failed():
        return
    for number, path in list(_WATCHED.items()):
        if native.lib.map_failed(number):
            raise StorageError(
                f"Reading {path} failed while it was in use: its disk has a fault, or somebody cut it short. "
                "Look at the system's log, restore the file and start the command again."
            )


class BlockSums:
    """The checksums of a file that grows."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._whole: list[Sums] = []
        self._crc = self._filled = 0

    def add(self, data: memoryview) -> None:
        view = np.frombuffer(data, np.uint8)
        made, self._crc, self._filled = block_sums(view, self._block_bytes, self._crc, self._filled)
        if len(made):
            self._whole.append(made)

    def sums(self) -> Sums:
        rest = [np.array([self._crc], np.uint32)] if self._filled else []
        return np.concatenate([np.empty(0, np.uint32), *self._whole, *rest])


def block_file(sums: Sums, num_bytes: int, index_crc: int) -> bytes:
    """P.blocks."""
    return _HEADER.pack(_MAGIC, _VERSION, BLOCK_BYTES, num_bytes, index_crc, 0) + sums.astype("<u4").tobytes()


def read_block_file(path: Path, sha256: str, num_bytes: int) -> tuple[Sums, int]:
    """(checksums of the blocks of a .bin of so many bytes, checksum of the .idx), as the sidecar vouches for them."""
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    way_out = "Copy it from where the dataset was made, make the dataset again, or read it unchecked: data.verify=none."
    if not path.exists():
        raise DataError(f"{path} is missing, and the sidecar beside it speaks of it. {way_out}")
    data = files.read_bytes(path, _HEADER.size + 4 * num_blocks)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(f"{path} has not the hash that its sidecar gives, so one of them is damaged. {way_out}")
    if len(data) != _HEADER.size + 4 * num_blocks:
        raise DataError(
            f"{path} has {len(data)} bytes, and the checksums of a .bin of {num_bytes} take "
            f"{_HEADER.size + 4 * num_blocks}. {way_out}"
        )
    magic, version, block_bytes, covered, index_crc, _ = _HEADER.unpack_from(data)
    if (magic, version, block_bytes, covered) != (_MAGIC, _VERSION, BLOCK_BYTES, num_bytes):
        raise DataError(
            f"{path} says version {version}, blocks of {block_bytes} and {covered} bytes; this lmtrain reads version "
            f"{_VERSION}, blocks of {BLOCK_BYTES}, and the .bin has {num_bytes}. {way_out}"
        )
    return np.frombuffer(data, "<u4", num_blocks, _HEADER.size), index_crc


@dataclass
class TokenBlocks:
    """Which blocks of a mapped .bin have been compared, and with what."""

    tokens: Mapped
    width: int  # bytes of a token
    sums: Sums
    state: NDArray[np.uint8]
    record: Record | None = None

    def __post_init__(self) -> None:
        record = -1 if self.record is None else self.record.fd
        self._blocks = native.compiled("BlockCheck", BlockCheckTwin)(  # which keeps `state` up
            self.tokens.bytes, BLOCK_BYTES, self.sums, self.state, self.width, record, self.tokens.fd
        )

    @classmethod
    def known(cls, tokens: Mapped, width: int, sums: Sums) -> TokenBlocks:
        return cls(tokens, width, sums, np.full(len(sums), _UNCHECKED, np.uint8))

    @classmethod
    def recorded(cls, tokens: Mapped, width: int, record: Record) -> TokenBlocks:
        sums, is_known = record.read(-(-tokens.num_bytes // BLOCK_BYTES))
        return cls(tokens, width, sums, np.where(is_known, _UNCHECKED, _UNKNOWN).astype(np.uint8), record)

    def check(self, starts: Int64s, sizes: Int64s, stride: int = 1, first: int = 0) -> None:
        """Raises where a block that these stretches of tokens touch is not what it should be.

        One size may stand for all. With a stride, starts are numbers of rows of so many tokens from `first` on.
        """
        bad = self._blocks.check(starts, sizes, stride, first)
        if bad != -1:
            self.tokens.refuse_lost()  # because: what was cut away is damaged too, and this says more
        if bad >= 0:
            raise self._damaged(bad)

    def check_all(self, part: int = 0, parts: int = 1) -> None:
        """All blocks, or one of several equal shares of them."""
        num_tokens, step = self.tokens.num_bytes // self.width, _ALL // self.width
        first, last = (num_tokens * at // parts for at in (part, part + 1))
        for start in range(first, last, step):
            self.check(np.array([start]), np.array([min(step, last - start)]))
            self.tokens.refuse_lost()

    def _damaged(self, block: int) -> DataError:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self.tokens.num_bytes)
        found, known = crc32c(self.tokens.bytes[start:stop]), int(self.sums[block])
        then = "was written there" if self.record is None else "was there when it was first read"
        replaced = "" if self.record is None else f", or remove {self.record.path} if you replaced the file yourself"
        prefix = self.tokens.path.with_suffix("")
        return DataError(
            f"{self.tokens.path}, bytes {start} to {stop - 1} (block {block}): this is not what {then} (CRC-32C "
            f"{found:08x} in place of {known:08x}). `lmtrain data verify {prefix}` looks at all of it; restore the "
            f"file or make the dataset again{replaced}. data.verify=none reads it as it is."
        )


class Record:
    """What was first read of a dataset that came without checksums. Where it cannot be written nothing is kept."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self.fd, self._say = path, -1, say
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def read(self, num_blocks: int) -> tuple[Sums, NDArray[np.bool_]]:
        """Each block's checksum, and whether it is known."""
        entries = np.zeros(num_blocks + 1, "<u8")
        if self.fd >= 0:
            data = files.read_range(self.fd, 0, entries.nbytes)
            entries[: len(data) // 8] = np.frombuffer(data, "<u8", len(data) // 8)
        sums = (entries & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        whole = (entries >> np.uint64(32)).astype(np.uint32) == ~sums
        if (lost := int(((entries != 0) & ~whole).sum())) > 0:
            self._say(f"{self.path}: {lost} of {len(entries)} entries were damaged and are made anew")
        self._index = int(sums[-1]) if whole[-1] else None
        return sums[:-1], whole[:-1]

    def check_index(self, num_blocks: int, crc: int) -> bool:
        """Whether the .idx is what it was; its checksum is the entry behind those of all blocks."""
        if self._index is None:
            if self.fd >= 0:
                os.pwrite(self.fd, struct.pack("<II", crc, crc ^ 0xFFFFFFFF), 8 * num_blocks)
            return True
        return self._index == crc


def block_sums(data: NDArray[np.uint8], block_bytes: int, crc: int, filled: int) -> tuple[Sums, int, int]:
    """Checksums of the blocks that `data` completes, and (checksum, bytes) of the one that it leaves open."""
    return native.compiled("block_sums", block_sums_twin)(data, block_bytes, crc, filled)


def block_sums_twin(data: NDArray[np.uint8], block_bytes: int, crc: int, filled: int) -> tuple[Sums, int, int]:
    sums, at = [], 0
    while at < len(data):
        now = data[at : at + block_bytes - filled]
        crc, filled, at = crc32c(now, crc), filled + len(now), at + len(now)
        if filled == block_bytes:
            sums.append(crc)
            crc = filled = 0
    return np.array(sums, np.uint32), crc, filled


@dataclass
class BlockCheckTwin:
    data: NDArray[np.uint8]
    block_bytes: int
    sums: Sums
    state: NDArray[np.uint8]
    width: int  # bytes of a token
    record: int  # file descriptors, or -1
    fd: int

    def check(self, starts: Int64s, sizes: Int64s, stride: int = 1, first: int = 0) -> int:
        """The first block under these stretches, not looked at before, whose checksum is wrong; or -1.

        -2: the file is shorter than it was, or something that is mapped could not be read.
        """
        starts = starts * stride + first
        for start, stop in zip(starts.tolist(), (starts + sizes).tolist(), strict=True):
            if not 0 <= start <= stop <= len(self.data) // self.width:
                raise ValueError("a stretch lies outside")
            last = -(-stop * self.width // self.block_bytes) if stop > start else 0
            for block in range(start * self.width // self.block_bytes, last):
                if self.state[block] != _CHECKED and not self._compare(block):
                    return block
        return -2 if self.fd >= 0 and os.fstat(self.fd).st_size < len(self.data) else -1

    def _compare(self, block: int) -> bool:
        found = crc32c(self.data[block * self.block_bytes : (block + 1) * self.block_bytes])
        if self.state[block] == _UNCHECKED and found != self.sums[block]:
            return False
        if self.state[block] != _UNKNOWN or self.record < 0 or _noted(self.record, block, found):
            self.state[block] = _CHECKED
        return True


def _noted(record: int, block: int, crc: int) -> bool:
    try:
        return os.pwrite(record, struct.pack("<II", crc, crc ^ 0xFFFFFFFF), 8 * block) == 8
    except OSError:
        return False
