"""Read files of torch.save without torch.load: values as plain data, tensors as places in the file, read when needed.

Called by the imports. Both of torch's formats: a zip archive, and the row of pickles and storages from before torch
1.6. Every size is compared with the file's before anything of that size is made, and an archive's bytes with its own
sums of them.
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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lmtrain.checkpoint.disk.checkpoint_format import DTYPES, ITEM_BYTES
from lmtrain.errors import CheckpointError, DataError, shorten
from lmtrain.exchange.torch_files.read_pickle_as_data import (
    MAX_DEPTH,
    MAX_PICKLE_BYTES,
    BoundedFile,
    CallRecord,
    Global,
    PersistentId,
    read_pickle,
    require_text,
)
from lmtrain.runtime.files.atomic_files import open_fd, open_regular, read_errors, read_range

if TYPE_CHECKING:
    from torch import Tensor

_MAGIC = 0x1950A86A20F9469CFC6C
_MAX_DIRECTORY_BYTES = 8 << 20  # of an archive; because: each of its entries is an object of half a kilobyte
_MAX_AXES = 16
_PART_BYTES = 16 << 20
_ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_CARRIERS: dict[int, Any] = {1: np.uint8, 2: "<i2", 4: "<i4", 8: "<i8"}
_STORAGES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "Untyped": "U8",
}  # fmt: skip
DTYPE_CODES = {f"torch.{name}": code for code, name in DTYPES.items()}


@dataclass(frozen=True)
class Storage:
    """A torch storage, the flat array that tensors are views of: its type, its key in the file and its number of items.
    """
    code: str
    key: str
    num_items: int


class _StoragePlace(NamedTuple):
    """The place of a storage in the file, in bytes; `crc` is the CRC-32 of its bytes in the archive's directory, 0 if
    there is none.
    """

    start: int
    size: int
    crc: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that still lies in its file; `read` loads it."""

    file: TorchFile
    key: str
    code: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items
    offset: int  # in items

    def read(self) -> Tensor:
        return self.file.read(self)


class TorchFile:
    """A file of torch.save, or a part of another file from byte `start` on. `value` is what was saved, with tensors as
    StoredTensor.
    """

    def __init__(self, path: Path, start: int = 0, size: int | None = None) -> None:
        self.path = path
        with _BoundedReader(path, start, size) as file:
            # because: an archive is known by its first bytes, and zipfile looks at a file's end only
            if file.read(4) == _ZIP_MAGIC:
                self._places, value = _read_archive(file, path)
            else:
                file.seek(0)
                self._places, value = _read_legacy(file, path)
        self._start, self._checked_keys = start, set[str]()
        self.value = self._resolve(value, {})

    def read(self, tensor: StoredTensor) -> Tensor:
        import torch  # because: values and the shapes of tensors are read without it

        start, size, crc = self._places[tensor.key]
        item_bytes = ITEM_BYTES[tensor.code]
        last_item = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        empty = 0 in tensor.shape
        # because: a stride of 0 would make much of little, and no saved weight has one
        if (not empty and (last_item + 1) * item_bytes > size) or math.prod(tensor.shape) * item_bytes > size:
            raise CheckpointError(
                f"{self.path} is damaged: it has too few bytes for its tensor of shape {list(tensor.shape)}. "
                "Get the file again."
            )
        count = 0 if empty else (last_item + 1 - tensor.offset) * item_bytes
        with read_errors(self.path), open_fd(self.path) as (fd, _):
            data = read_range(fd, self._start + start + tensor.offset * item_bytes, count)
            if crc and tensor.key not in self._checked_keys:
                stored = [data] if count == size else _read_parts(fd, self._start + start, size)
                self._check_crc(tensor.key, stored, crc)
        if len(data) != count:
            raise CheckpointError(f"{self.path} is cut short. Get the file again.")
        view: np.ndarray[Any, Any] = np.ndarray(
            tensor.shape, _CARRIERS[item_bytes], data, 0, tuple(s * item_bytes for s in tensor.strides)
        )
        return torch.from_numpy(np.array(view, order="C")).view(getattr(torch, DTYPES[tensor.code]))

    def _check_crc(self, key: str, parts: Iterable[bytes], crc: int) -> None:
        """Raise CheckpointError unless `crc` is the CRC-32 of a storage's bytes, which are given in consecutive parts.
        Otherwise remember the storage's name `key`, so that further tensors in it are read without another check.
        """
        actual = 0
        for part in parts:
            actual = zlib.crc32(part, actual)
        if actual != crc:
            raise CheckpointError(
                f"{self.path} is damaged: its entry data/{shorten(key)} does not have the CRC-32 that the archive "
                "states. Get the file again."
            )
        self._checked_keys.add(key)

    def _resolve(self, value: Any, resolved: dict[int, Any], depth: int = 0) -> Any:
        """Return `value`, read from a pickle, with each recorded tensor in it, however deep, replaced by a
        StoredTensor, and each torch parameter by its tensor. `resolved` has the results so far by id(value), since
        pickles share values; `depth` is how deep the value is nested.
        """
        if id(value) in resolved:
            return resolved[id(value)]
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self.path} nests its values deeper than {MAX_DEPTH} levels. Get the file again.")
        if isinstance(value, dict):
            result = resolved[id(value)] = {}
            result.update({key: self._resolve(v, resolved, depth + 1) for key, v in value.items()})
            return result
        if isinstance(value, list):
            rows: list[Any] = []
            resolved[id(value)] = rows
            rows.extend(self._resolve(v, resolved, depth + 1) for v in value)
            return rows
        if isinstance(value, tuple) and not isinstance(value, (Global, PersistentId)):
            # because: pickles share what is the same, and one that nests pairs of the same would never end
            return resolved.setdefault(id(value), tuple(self._resolve(v, resolved, depth + 1) for v in value))
        return self._resolve_call(value, resolved, depth + 1) if isinstance(value, CallRecord) else value

    def _resolve_call(self, value: CallRecord, resolved: dict[int, Any], depth: int) -> Any:
        resolved[id(value)] = value
        if value.path in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            resolved[id(value)] = self._stored_tensor(value.args, has_dtype=value.path.endswith("v3"))
        elif value.path in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            if not (isinstance(value.args, tuple) and value.args):
                raise CheckpointError(f"{self.path} holds a parameter without its tensor. Get the file again.")
            resolved[id(value)] = self._resolve(value.args[0], resolved, depth)
        else:
            value.state = self._resolve(value.state, resolved, depth)
        return resolved[id(value)]

    def _stored_tensor(self, args: Any, *, has_dtype: bool) -> StoredTensor:
        try:
            persistent, offset, shape, strides = args[:4]
            storage = _parse_storage(persistent)
            if not len(shape) == len(strides) <= _MAX_AXES:
                raise ValueError(
                    f"a tensor has {len(shape)} axes and {len(strides)} strides, not equally many up to {_MAX_AXES}"
                )
            code = DTYPE_CODES[args[6].path] if has_dtype else storage.code
            if not all(type(n) is int and 0 <= n < 1 << 48 for n in (offset, *shape, *strides)):
                raise ValueError("the shape, strides or offset of a tensor are not whole numbers from 0")
            size = self._places[storage.key].size
            if storage.num_items * ITEM_BYTES[storage.code] != size:
                raise ValueError(f"a storage of {storage.num_items} elements cannot have {size} bytes")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} holds a tensor that cannot be read: {shorten(error)}. Get the file again."
            ) from error
        return StoredTensor(self, storage.key, code, tuple(shape), tuple(strides), offset)


def _read_parts(fd: int, start: int, size: int) -> Iterator[bytes]:
    for at in range(start, start + size, _PART_BYTES):
        yield read_range(fd, at, min(_PART_BYTES, start + size - at))


def _parse_storage(value: Any) -> Storage:
    """Return the storage that `value` stands for: a persistent id of a torch pickle, with the key ('storage', class,
    key, device, number of elements). Raise ValueError, TypeError or AttributeError if it is malformed.
    """
    kind, storage_class, key, _, num_items, *views = value.key
    name = require_text(storage_class.name, "a class").removesuffix("Storage")
    if kind != "storage" or name not in _STORAGES or type(num_items) is not int:
        raise ValueError(f"a storage has the unknown class {shorten(storage_class.path)}")
    if any(view is not None for view in views):
        raise ValueError("a storage is a view of another storage, which is not supported")
    return Storage(_STORAGES[name], require_text(key, "a storage's key"), num_items)


def _read_archive(file: _BoundedReader, path: Path) -> tuple[dict[str, _StoragePlace], Any]:
    """Read `file`, a zip archive as torch.save writes it since torch 1.6, without running its pickle. Return (storage
    key -> place of its bytes, the pickle's value). Raise CheckpointError if it is malformed; `path` is for messages.
    """
    try:
        file.max_read_bytes = _MAX_DIRECTORY_BYTES
        infos = zipfile.ZipFile(file).infolist()
        file.max_read_bytes = MAX_PICKLE_BYTES
        entries = {info.filename.partition("/")[2]: info for info in infos}
        compressed = [i for i in infos if i.compress_type != zipfile.ZIP_STORED or i.file_size != i.compress_size]
        if compressed or "data.pkl" not in entries:
            raise ValueError("the file is not an archive that torch.save wrote")
        if len(entries) < len(infos):
            raise ValueError("the archive holds two entries of the same name")
        places = {
            name: _StoragePlace(_data_start(file, info), info.file_size, info.CRC) for name, info in entries.items()
        }
        if "byteorder" in places and _read_entry(file, places["byteorder"], "byteorder") != b"little":
            raise ValueError("the numbers are big-endian; only little-endian files can be read")
        pickle = _read_entry(file, places["data.pkl"], "data.pkl")
    except (
        zipfile.BadZipFile, ValueError, OSError, RuntimeError, struct.error, EOFError, OverflowError, LookupError
    ) as error:  # fmt: skip
        raise CheckpointError(f"{path} cannot be read: {shorten(error)}. Get the file again.") from error
    storages = {name.removeprefix("data/"): place for name, place in places.items() if name.startswith("data/")}
    return storages, read_pickle(io.BytesIO(pickle), path)


def _read_entry(file: _BoundedReader, place: _StoragePlace, name: str) -> bytes:
    file.seek(place.start)
    data = file.read(place.size)
    if place.crc and zlib.crc32(data) != place.crc:
        raise ValueError(f"the entry {name} does not have the CRC-32 that the archive states")
    return data


def _data_start(file: _BoundedReader, info: zipfile.ZipInfo) -> int:
    """Return the byte offset in `file` at which the content of the archive's entry `info` begins, behind the entry's
    own header. Raise ValueError if there is no such header, or the content goes beyond the file's end.
    """
    file.seek(info.header_offset)
    mark, *_, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if mark != _ZIP_MAGIC or start + info.file_size > file.size:
        raise ValueError(f"the entry {shorten(info.filename)} does not lie within the file")
    return int(start)


def _read_legacy(file: _BoundedReader, path: Path) -> tuple[dict[str, _StoragePlace], Any]:
    """Read `file`, written by torch.save before torch 1.6, without running its pickles: magic number, version, machine,
    value and keys, then each storage behind its length. Return (storage key -> place of its bytes, the value). Raise
    CheckpointError if it is malformed; `path` is for messages.
    """
    if (file.size > 1 and file.peek(1)[:1] != b"\x80") or read_pickle(BoundedFile(file), path) != _MAGIC:
        raise CheckpointError(f"{path} is not a file that torch.save wrote. Check the path.")
    read_pickle(BoundedFile(file), path)
    machine = read_pickle(BoundedFile(file), path)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError(
            f"{path} has big-endian numbers; only little-endian files can be read. Save it on another machine."
        )
    value = read_pickle(BoundedFile(file), path)
    storages: dict[str, Storage] = {}
    _collect_storages(value, storages)
    places: dict[str, _StoragePlace] = {}
    keys = read_pickle(BoundedFile(file), path)
    for key in keys if isinstance(keys, list) else []:
        (count,) = struct.unpack("<q", file.read(8).ljust(8, b"\xff"))
        storage = storages.get(key) if isinstance(key, str) else None
        size = count * ITEM_BYTES[storage.code] if storage else -1
        start = file.tell()
        if not 0 <= size <= file.size - start:
            raise CheckpointError(f"{path} is cut short. Get the file again.")
        places[key] = _StoragePlace(start, size, 0)
        file.seek(start + size)
    return places, value


def _collect_storages(value: Any, storages: dict[str, Storage]) -> None:
    pending, seen = [value], set()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, PersistentId):
            with suppress(TypeError, ValueError, AttributeError):
                storage = _parse_storage(node)
                storages[storage.key] = storage
        elif isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, (list, tuple)):
            pending += node
        elif isinstance(node, CallRecord):
            pending += [node.args, node.state, node.items, node.entries]


class _BoundedReader(io.BufferedReader):
    """A part of a plain file, opened as a file of its own."""

    def __init__(self, path: Path, start: int, size: int | None) -> None:
        with read_errors(path):
            fd, file_size = open_regular(path, follow_links=True)
        size = file_size - start if size is None else size
        if start < 0 or size < 0 or start + size > file_size:
            os.close(fd)
            raise DataError(f"{path} has {file_size} bytes, but must have {start + size}. Get the file again.")
        self.size, self.max_read_bytes = size, MAX_PICKLE_BYTES
        super().__init__(_RawPart(fd, start, size))

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes, by default all that are left. Raise ValueError if that is more than
        `max_read_bytes`, since an archive may claim any size.
        """
        size = self.size - self.tell() if size is None or size < 0 else size
        if size > self.max_read_bytes:
            raise ValueError(f"the archive asks for a part of {size} bytes; at most {self.max_read_bytes} are allowed")
        return super().read(size)


class _RawPart(io.RawIOBase):
    """The unbuffered file below _BoundedReader: `size` bytes of a descriptor from byte `start` on."""
    def __init__(self, fd: int, start: int, size: int) -> None:
        self._fd, self._start, self._size, self._position = fd, start, size, 0

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._fd, max(0, min(len(buffer), self._size - self._position)), self._start + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("the archive refers to a place before the beginning of the file")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()
