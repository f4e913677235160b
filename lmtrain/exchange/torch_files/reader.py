"""What torch.save wrote, without torch.load: values as plain data, tensors as places in the file, read when asked for.

Called by the imports. Both of torch's formats: a zip archive, and the row of pickles and storages from before
torch 1.6. Every size is compared with the file's before anything of that size is made, and an archive's bytes with its
own sums of them.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtrain.checkpoint.disk.format import DTYPES, ITEM_BYTES
from lmtrain.errors import CheckpointError, DataError, shorten
from lmtrain.exchange.torch_files.pickle_data import (
    MAX_DEPTH,
    MAX_PICKLE_BYTES,
    Global,
    Made,
    Measured,
    Persistent,
    checked_text,
    read_pickle,
)
from lmtrain.runtime.files.files import open_fd, open_regular, read_errors, read_range

_MAGIC = 0x1950A86A20F9469CFC6C
_MAX_DIRECTORY_BYTES = 8 << 20  # of an archive; because: each of its entries is an object of half a kilobyte
_MAX_AXES = 16
_PART_BYTES = 16 << 20
_ARCHIVE = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_CARRIERS: dict[int, Any] = {1: np.uint8, 2: "<i2", 4: "<i4", 8: "<i8"}
_STORAGES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "Untyped": "U8",
}  # fmt: skip
_DTYPE_CODES = {f"torch.{name}": code for code, name in DTYPES.items()}


@dataclass(frozen=True)
class Storage:
    code: str
    key: str
    num_items: int


class _Place(NamedTuple):
    """Where a storage lies; `crc` is what the archive says of its bytes, 0 where it says nothing."""

    start: int
    size: int
    crc: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that still lies in its file."""

    file: TorchFile
    key: str
    code: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items
    offset: int  # in items

    def read(self) -> Tensor:
        return self.file.read(self)


class TorchFile:
    """A file of torch.save, or one that lies within another at `start`. `value` is what was saved."""

    def __init__(self, path: Path, start: int = 0, size: int | None = None) -> None:
        self.path = path
        with _File(path, start, size) as file:
            # because: an archive is known by its first bytes, and zipfile looks at a file's end only
            if file.read(4) == _ARCHIVE:
                self._places, value = _read_archive(file, path)
            else:
                file.seek(0)
                self._places, value = _read_legacy(file, path)
        self._start, self._compared = start, set[str]()
        self.value = self._resolved(value, {})

    def read(self, tensor: StoredTensor) -> Tensor:
        at, size, crc = self._places[tensor.key]
        item = ITEM_BYTES[tensor.code]
        last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        empty = 0 in tensor.shape
        # because: a stride of 0 would make much of little, and no saved weight has one
        if (not empty and (last + 1) * item > size) or math.prod(tensor.shape) * item > size:
            raise CheckpointError(
                f"{self.path} claims a tensor of shape {list(tensor.shape)} that it has no bytes for."
            )
        count = 0 if empty else (last + 1 - tensor.offset) * item
        with read_errors(self.path), open_fd(self.path) as (fd, _):
            data = read_range(fd, self._start + at + tensor.offset * item, count)
            if crc and tensor.key not in self._compared:
                self._compare(tensor.key, [data] if count == size else _parts(fd, self._start + at, size), crc)
        if len(data) != count:
            raise CheckpointError(f"{self.path} ends too early. Get the file again.")
        view: np.ndarray[Any, Any] = np.ndarray(
            tensor.shape, _CARRIERS[item], data, 0, tuple(s * item for s in tensor.strides)
        )
        return torch.from_numpy(np.array(view, order="C")).view(getattr(torch, DTYPES[tensor.code]))

    def _compare(self, key: str, parts: Iterable[bytes], crc: int) -> None:
        """because: several tensors may lie in one storage, which has one sum"""
        found = 0
        for part in parts:
            found = zlib.crc32(part, found)
        if found != crc:
            raise CheckpointError(
                f"{self.path} is damaged: the bytes of data/{shorten(key)} are not those that were saved. "
                "Get the file again."
            )
        self._compared.add(key)

    def _resolved(self, value: Any, seen: dict[int, Any], depth: int = 0) -> Any:
        """Return a value with its tensors resolved and torch's wrappers removed."""
        if id(value) in seen:
            return seen[id(value)]
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self.path} nests deeper than any state of a run. Get the file again.")
        if isinstance(value, dict):
            result = seen[id(value)] = {}
            result.update({key: self._resolved(v, seen, depth + 1) for key, v in value.items()})
            return result
        if isinstance(value, list):
            rows: list[Any] = []
            seen[id(value)] = rows
            rows.extend(self._resolved(v, seen, depth + 1) for v in value)
            return rows
        if isinstance(value, tuple) and not isinstance(value, (Global, Persistent)):
            # because: pickles share what is the same, and one that nests pairs of the same would never end
            return seen.setdefault(id(value), tuple(self._resolved(v, seen, depth + 1) for v in value))
        if isinstance(value, Made):
            return self._resolved_made(value, seen, depth + 1)
        return value

    def _resolved_made(self, value: Made, seen: dict[int, Any], depth: int) -> Any:
        seen[id(value)] = value
        if value.path in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            seen[id(value)] = self._tensor(value.args, typed=value.path.endswith("v3"))
        elif value.path in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            if not (isinstance(value.args, tuple) and value.args):
                raise CheckpointError(f"{self.path} holds a parameter without a tensor. Get the file again.")
            seen[id(value)] = self._resolved(value.args[0], seen, depth)
        else:
            value.state = self._resolved(value.state, seen, depth)
        return seen[id(value)]

    def _tensor(self, args: Any, *, typed: bool) -> StoredTensor:
        try:
            persistent, offset, shape, strides = args[:4]
            storage = _storage(persistent)
            if not len(shape) == len(strides) <= _MAX_AXES:
                raise ValueError(f"it has {len(shape)} axes and {len(strides)} strides")
            code = _DTYPE_CODES[args[6].path] if typed else storage.code
            if not all(type(n) is int and 0 <= n < 1 << 48 for n in (offset, *shape, *strides)):
                raise ValueError("its shape is none")
            size = self._places[storage.key].size
            if storage.num_items * ITEM_BYTES[storage.code] != size:
                raise ValueError(f"{storage.num_items} items in {size} bytes")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} holds a tensor that cannot be read: {shorten(error)}. Get it again."
            ) from error
        return StoredTensor(self, storage.key, code, tuple(shape), tuple(strides), offset)


def _parts(fd: int, start: int, size: int) -> Iterator[bytes]:
    for at in range(start, start + size, _PART_BYTES):
        yield read_range(fd, at, min(_PART_BYTES, start + size - at))


def _storage(value: Any) -> Storage:
    """('storage', class, key, device, number of items), which torch puts in a tensor's place."""
    kind, of, key, _, num_items, *views = value.key
    name = checked_text(of.name, "a class").removesuffix("Storage")
    if kind != "storage" or name not in _STORAGES or type(num_items) is not int:
        raise ValueError(f"a storage of the class {shorten(of.path)}")
    if any(view is not None for view in views):
        raise ValueError("a storage that is a part of another")
    return Storage(_STORAGES[name], checked_text(key, "a storage's key"), num_items)


def _read_archive(file: _File, path: Path) -> tuple[dict[str, _Place], Any]:
    """Return where each storage of an archive lies, and its pickle."""
    try:
        file.most_bytes = _MAX_DIRECTORY_BYTES
        found = zipfile.ZipFile(file).infolist()
        file.most_bytes = MAX_PICKLE_BYTES
        entries = {info.filename.partition("/")[2]: info for info in found}
        bad = [i for i in found if i.compress_type != zipfile.ZIP_STORED or i.file_size != i.compress_size]
        if bad or "data.pkl" not in entries:
            raise ValueError("it is not an archive of torch.save")
        if len(entries) < len(found):
            raise ValueError("it holds two entries of one name")
        places = {name: _Place(_data_start(file, info), info.file_size, info.CRC) for name, info in entries.items()}
        if "byteorder" in places and _content(file, places["byteorder"], "byteorder") != b"little":
            raise ValueError("its numbers have their bytes the other way round")
        pickle = _content(file, places["data.pkl"], "data.pkl")
    except (
        zipfile.BadZipFile, ValueError, OSError, RuntimeError, struct.error, EOFError, OverflowError, LookupError
    ) as error:  # fmt: skip
        raise CheckpointError(f"{path} cannot be read: {shorten(error)}. Get the file again.") from error
    storages = {name.removeprefix("data/"): place for name, place in places.items() if name.startswith("data/")}
    return storages, read_pickle(io.BytesIO(pickle), path)


def _content(file: _File, place: _Place, name: str) -> bytes:
    file.seek(place.start)
    data = file.read(place.size)
    if place.crc and zlib.crc32(data) != place.crc:
        raise ValueError(f"the bytes of {name} are not those that were saved")
    return data


def _data_start(file: _File, info: zipfile.ZipInfo) -> int:
    """Behind the entry's own header, whose lengths need not be those of the directory."""
    file.seek(info.header_offset)
    mark, *_, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if mark != _ARCHIVE or start + info.file_size > file.size:
        raise ValueError(f"{shorten(info.filename)} ends behind the file")
    return int(start)


def _read_legacy(file: _File, path: Path) -> tuple[dict[str, _Place], Any]:
    """Read the older format: magic number, version, machine, value, keys, then each storage behind its length."""
    if (file.size > 1 and file.peek(1)[:1] != b"\x80") or read_pickle(Measured(file), path) != _MAGIC:
        raise CheckpointError(f"{path} is not a file of torch.save. Check the path.")
    read_pickle(Measured(file), path)
    machine = read_pickle(Measured(file), path)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError(f"{path} has its numbers' bytes the other way round. Save it on another machine.")
    value = read_pickle(Measured(file), path)
    codes: dict[str, Storage] = {}
    _find_storages(value, codes)
    places: dict[str, _Place] = {}
    keys = read_pickle(Measured(file), path)
    for key in keys if isinstance(keys, list) else []:
        (count,) = struct.unpack("<q", file.read(8).ljust(8, b"\xff"))
        storage = codes.get(key) if isinstance(key, str) else None
        size = count * ITEM_BYTES[storage.code] if storage else -1
        start = file.tell()
        if not 0 <= size <= file.size - start:
            raise CheckpointError(f"{path} ends too early. Get the file again.")
        places[key] = _Place(start, size, 0)
        file.seek(start + size)
    return places, value


def _find_storages(value: Any, found: dict[str, Storage]) -> None:
    todo, seen = [value], set()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Persistent):
            with suppress(TypeError, ValueError, AttributeError):
                storage = _storage(node)
                found[storage.key] = storage
        elif isinstance(node, Mapping):
            todo += node.values()
        elif isinstance(node, (list, tuple)):
            todo += node
        elif isinstance(node, Made):
            todo += [node.args, node.state, node.items, node.entries]


class _File(io.BufferedReader):
    """A part of a plain file as a file of its own."""

    def __init__(self, path: Path, start: int, size: int | None) -> None:
        with read_errors(path):
            fd, whole = open_regular(path, follow_links=True)
        size = whole - start if size is None else size
        if start < 0 or size < 0 or start + size > whole:
            os.close(fd)
            raise DataError(f"{path} has {whole} bytes and not {start + size}. Get the file again.")
        self.size, self.most_bytes = size, MAX_PICKLE_BYTES
        super().__init__(_Part(fd, start, size))

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `most_bytes` at once, since an archive itself claims how long its parts are."""
        size = self.size - self.tell() if size is None or size < 0 else size
        if size > self.most_bytes:
            raise ValueError(f"a part of {size} bytes, where {self.most_bytes} are the most")
        return super().read(size)


class _Part(io.RawIOBase):
    def __init__(self, fd: int, start: int, size: int) -> None:
        self._fd, self._start, self._size, self._at = fd, start, size, 0

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._fd, max(0, min(len(buffer), self._size - self._at)), self._start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()
