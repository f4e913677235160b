"""Write files that torch.load reads, tensors and all, one tensor at a time. Called by the exports.

The archive that torch.save writes: a pickle of plain values in which tensors are named, and each one's bytes beside it.
The few instructions that such a pickle needs are spelled out here, so that nothing of ours ever pickles an object.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import ITEM_BYTES

_STORAGES = {"F32": "FloatStorage", "BF16": "BFloat16Storage", "F16": "HalfStorage"}
_ARCHIVE_ROOT = "archive"


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to write; `parts` is called when its bytes are needed, and returns them in parts."""

    code: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[memoryview]]

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_items * ITEM_BYTES[self.code]


@dataclass(frozen=True)
class Namespace:
    """Arguments that are written as an argparse.Namespace, as Megatron-LM saves them."""

    values: Mapping[str, Any]


def write_torch_file(path: Path, value: Any) -> None:
    """Write `value` to a new file that torch.load reads; an existing file is an error. `value` consists of dicts,
    lists, tuples, texts, numbers, None, `Namespace` and `TensorToWrite`; one tensor at a time is in memory.
    """
    tensors: list[TensorToWrite] = []
    pickle = b"\x80\x02" + _encode_value(value, tensors) + b"."
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for name, data in {"data.pkl": pickle, "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(zipfile.ZipInfo(f"{_ARCHIVE_ROOT}/{name}"), data)
        for number, tensor in enumerate(tensors):
            with archive.open(zipfile.ZipInfo(f"{_ARCHIVE_ROOT}/data/{number}"), "w", force_zip64=True) as file:
                num_written = sum(file.write(part) for part in tensor.parts())
                assert num_written == tensor.num_bytes, "a tensor came in another size"


def _encode_value(value: Any, tensors: list[TensorToWrite]) -> bytes:
    """Return the bytes of pickle instructions (protocol 2) that push `value` on the stack, and append each tensor in it
    to `tensors`. Raise TypeError for a value of another type than `write_torch_file` takes.
    """
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(data)]) + data
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case tuple():
            return b"(" + b"".join(_encode_value(v, tensors) for v in value) + b"t"
        case list():
            return b"](" + b"".join(_encode_value(v, tensors) for v in value) + b"e"
        case Mapping():
            items = (_encode_value(k, tensors) + _encode_value(v, tensors) for k, v in value.items())
            return b"}(" + b"".join(items) + b"u"
        case Namespace():
            return b"cargparse\nNamespace\n)\x81" + _encode_value(value.values, tensors) + b"b"
        case TensorToWrite():
            tensors.append(value)
            return _encode_tensor(value, str(len(tensors) - 1))
    raise TypeError(f"A value of type {type(value).__name__} cannot be written to a torch file.")


def _encode_tensor(tensor: TensorToWrite, key: str) -> bytes:
    strides = tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
    storage = b"(" + _encode_value("storage", []) + f"ctorch\n{_STORAGES[tensor.code]}\n".encode()
    storage += _encode_value(key, []) + _encode_value("cpu", []) + _encode_value(tensor.num_items, []) + b"tQ"
    layout = _encode_value(0, []) + _encode_value(tensor.shape, []) + _encode_value(strides, []) + b"\x89"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + layout + b"ccollections\nOrderedDict\n)RtR"
